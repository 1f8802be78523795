// The backward. With c_i = grad_out . outs[i] and delta = sum_i w_i c_i,
//   grad_outs[i] = w_i grad_out,  grad_lses[i] = w_i (c_i - delta + grad_lse).
// The merged out is not read, so that its rounding does not add to the error. outs are read for
// grad_lses only.
#pragma once
#include <cstdint>

#include "core/vec.cuh"
#include "merge_states/row.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::merge_states {

// The weight w_i of a part in a row. It may round to 0 for a part that is not ignored; products
// with it are computed all the same, so that they are NaN where the other factor is not finite.
struct Weight {
  bool ignored;
  float value;  // 0 where the part is ignored, also in rows without a finite sum

  __device__ __forceinline__ Weight(float exp, float scale)
      : ignored(exp == 0.f), value(ignored ? 0.f : exp * scale) {}

  __device__ __forceinline__ float times(float factor) const {
    return ignored ? 0.f : value * factor;
  }
};

template <int kElements>
__device__ __forceinline__ float dot(const float (&a)[kElements], const float (&b)[kElements]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// Computes the c_i of some parts and rows, summed over the `lanes` lanes of a row.
template <class V>
__device__ __forceinline__ void compute_products(const V (&outs)[kPartsAtOnce][kBwdRowsAtOnce],
                                                 const V (&grad_out)[kBwdRowsAtOnce], int lanes,
                                                 float (&sums)[kPartsAtOnce][kBwdRowsAtOnce]) {
#pragma unroll
  for (int r = 0; r < kBwdRowsAtOnce; ++r) {
    float grads[V::kElements], values[V::kElements];
    grad_out[r].unpack(grads);
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p) {
      outs[p][r].unpack(values);
      sums[p][r] = dot(grads, values);
    }
  }
  for (int distance = 1; distance < lanes; distance *= 2) {
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p) {
#pragma unroll
      for (int r = 0; r < kBwdRowsAtOnce; ++r) {
        sums[p][r] += __shfl_xor_sync(0xffffffffu, sums[p][r], distance);
      }
    }
  }
}

// grad_outs of a part: w_i grad_out.
template <class V>
__device__ __forceinline__ V weighted(const V& grad_out, const Weight& weight) {
  float grads[V::kElements];
  grad_out.unpack(grads);
#pragma unroll
  for (int i = 0; i < V::kElements; ++i) grads[i] = weight.times(grads[i]);
  V vec;
  vec.pack(grads);
  return vec;
}

// Computes grad_lses from the c_i, which are in `products` [part][row] if one window holds all
// parts, otherwise in grad_lses itself. `grad_lse`: of each row.
template <class Args, int kTensors>
__device__ __forceinline__ void finish_grad_lses(const Args& args, const Tile<kTensors>& tile,
                                                 int rows, const float* products,
                                                 const float* grad_lse) {
  bool const one_window = args.parts <= args.split.window();
  tile.for_each_row(args.split, [&](int wanted, int lane, int lanes) {
    int const row = min(wanted, rows - 1);
    float const base = tile.base[row], scale = tile.scale[row];
    float* const slots = args.grad_lses + tile.lse_index[row];
    auto weight_of = [&](int part) {
      return Weight(one_window ? tile.weights[part * args.split.tile_rows + row]
                               : exp_from(args.lses.part(part)[tile.lse_offset[row]], base),
                    scale);
    };
    auto product_of = [&](int part) {
      return one_window ? products[part * args.split.tile_rows + row]
                        : slots[part * args.row_count];
    };
    float delta = 0.f;
    for (int part = lane; part < args.parts; part += lanes) {
      delta = fmaf(weight_of(part).value, product_of(part), delta);
    }
    delta = tile.combine(delta, lanes, [](float a, float b) { return a + b; });
    if (wanted >= rows) return;
    for (int part = lane; part < args.parts; part += lanes) {
      slots[part * args.row_count] =
          weight_of(part).times(product_of(part) - delta + grad_lse[row]);
    }
  });
}

// Tensors for which Tile has offsets of rows.
enum BwdTensor { kOuts, kGradOut, kGradOuts, kBwdTensors };

// A step of the kernel's loops: a Vec of columns, from `column` on, of kBwdRowsAtOnce rows and
// kPartsAtOnce parts.
template <class Dtype, bool kAligned>
struct BwdStep {
  using V = Vec<Dtype>;
  using Vecs = V[kPartsAtOnce][kBwdRowsAtOnce];

  const BwdArgs<typename Dtype::Word>& args;
  const Split& split;
  const Tile<kBwdTensors>& tile;
  const ThreadCoordinate& at;
  int rows;                   // of the tile
  int first_row, column = 0;  // first_row: of all threads
  int first = 0, end = 0;     // the window: its first part, and number of parts
  int first_part = 0;         // of all threads, in the window

  __device__ __forceinline__ int row(int r) const {
    return first_row + at.row + r * split.row_step();
  }
  __device__ __forceinline__ int part(int p) const {
    return first_part + at.group + p * split.groups();
  }
  // Elements of a row from the column on.
  __device__ __forceinline__ int count(int r) const {
    return row(r) < rows ? args.head_dim - column : 0;
  }

  __device__ __forceinline__ void load_grad_out(V (&grad_out)[kBwdRowsAtOnce]) const {
#pragma unroll
    for (int r = 0; r < kBwdRowsAtOnce; ++r) {
      int64_t const offset = tile.offset[kGradOut][min(row(r), rows - 1)];
      grad_out[r].template load<kAligned>(args.grad_out.data + offset + column, count(r));
    }
  }

  // Loads outs, which are read for grad_lses only.
  __device__ __forceinline__ void load_outs(Vecs& outs, bool of_lses) const {
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p) {
      bool const wanted = of_lses && part(p) < end;
      const auto* const from = args.outs.part(first + min(part(p), end - 1)) + column;
#pragma unroll
      for (int r = 0; r < kBwdRowsAtOnce; ++r) {
        int64_t const offset = tile.offset[kOuts][min(row(r), rows - 1)];
        outs[p][r].template load<kAligned>(from + offset, wanted ? count(r) : 0);
      }
    }
  }

  // Adds the columns' part of the c_i to `products` [part][row] if one window holds all parts,
  // otherwise to grad_lses. `first_columns`: there is nothing there yet.
  __device__ __forceinline__ void add_products(const Vecs& outs,
                                               const V (&grad_out)[kBwdRowsAtOnce], bool one_window,
                                               bool first_columns, float* products) const {
    float sums[kPartsAtOnce][kBwdRowsAtOnce];
    compute_products(outs, grad_out, split.lanes(), sums);
    if (at.lane != 0) return;
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p) {
#pragma unroll
      for (int r = 0; r < kBwdRowsAtOnce; ++r) {
        if (part(p) >= end || row(r) >= rows) continue;
        int const index = part(p) * split.tile_rows + row(r);
        float* const slot = one_window ? products + index
                                       : args.grad_lses + (first + part(p)) * args.row_count +
                                             tile.lse_index[row(r)];
        *slot = (first_columns ? 0.f : *slot) + (tile.weights[index] != 0.f ? sums[p][r] : 0.f);
      }
    }
  }

  __device__ __forceinline__ void store_grad_outs(const V (&grad_out)[kBwdRowsAtOnce]) const {
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p) {
      if (part(p) >= end || !args.writes(first + part(p))) continue;
      auto* const to = args.grad_of(first + part(p)) + column;
#pragma unroll
      for (int r = 0; r < kBwdRowsAtOnce; ++r) {
        int const existing = min(row(r), rows - 1);
        Weight const weight(tile.weights[part(p) * split.tile_rows + existing],
                            tile.scale[existing]);
        V const vec = weighted(grad_out[r], weight);
        vec.template store<kAligned>(to + tile.offset[kGradOuts][existing], count(r));
      }
    }
  }
};

template <class Dtype, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2)
    bwd_kernel(const __grid_constant__ BwdArgs<typename Dtype::Word> args) {
  using V = Vec<Dtype>;
  __shared__ Tile<kBwdTensors> tile;
  __shared__ float products[kWindow], grad_lse[kTileRows];
  ptx::griddepcontrol_launch_dependents();
  Split const split = args.split;
  ThreadCoordinate const at(split);
  int64_t const existing = args.row_count - tile.first_row(split);
  int const rows = existing < split.tile_rows ? static_cast<int>(existing) : split.tile_rows;
  bool const of_lses = args.grad_lses != nullptr;

  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  tile.compute_rows(args, {&args.outs.strides, &args.grad_out.strides, &args.grad_outs.strides});
  bool const one_window = args.parts <= split.window();
  if (one_window && !tile.rows_give_weights(args)) tile.compute_weights(args, 0);
  // Loaded here, used at the end: no thread waits for it.
  bool const has_grad_lse =
      of_lses && args.grad_lse != nullptr && static_cast<int>(threadIdx.x) < rows;
  float const own_grad_lse = has_grad_lse ? args.grad_lse[tile.lse_index[threadIdx.x]] : 0.f;

  for (int first_row = 0; first_row < rows; first_row += kBwdRowsAtOnce * split.row_step()) {
    BwdStep<Dtype, kAligned> step{args, split, tile, at, rows, first_row};
    for (int start = 0; start == 0 || start < args.head_dim;
         start += split.lanes() * V::kElements) {
      step.column = start + at.lane * V::kElements;
      V grad_out[kBwdRowsAtOnce];
      step.load_grad_out(grad_out);
      for (step.first = 0; step.first < args.parts; step.first += split.window()) {
        if (!one_window) tile.compute_weights(args, step.first);
        step.end = min(args.parts - step.first, split.window());
        // All groups take the same number of steps, as the shuffles require.
        for (step.first_part = 0; step.first_part < step.end;
             step.first_part += kPartsAtOnce * split.groups()) {
          V outs[kPartsAtOnce][kBwdRowsAtOnce];
          step.load_outs(outs, of_lses);
          if (of_lses) step.add_products(outs, grad_out, one_window, start == 0, products);
          step.store_grad_outs(grad_out);
        }
      }
    }
  }
  if (!of_lses) return;
  if (static_cast<int>(threadIdx.x) < rows) grad_lse[threadIdx.x] = own_grad_lse;
  __syncthreads();  // all threads have written their c_i, and grad_lse of their row
  finish_grad_lses(args, tile, rows, products, grad_lse);
}

}  // namespace flashvar::merge_states
