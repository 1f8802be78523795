// The forward: out = sum_i w_i outs[i] and its log-sum-exp. Bound by memory: a block first finds
// the weights of its rows, then each thread sums a Vec at a time over the parts, of kRowsAtOnce
// rows at a time.
#pragma once
#include <cstdint>

#include "core/vec.cuh"
#include "merge_states/row.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::merge_states {

// Adds up the groups' sums of a Vec; the result is valid in the first group. Called by all
// threads of the block. `shared`: kElements floats per thread.
template <int kElements>
__device__ __forceinline__ void add_groups(const Split& split, int group, float (&sums)[kElements],
                                           float* shared) {
  if (split.groups_log2 == 0) return;
  __syncthreads();  // all threads have read `shared`, which is overwritten
#pragma unroll
  for (int i = 0; i < kElements; ++i) shared[i * kThreads + threadIdx.x] = sums[i];
  __syncthreads();  // all threads have written their sums
  if (group != 0) return;
  int const step = kThreads >> split.groups_log2;
  for (int other = 1; other < split.groups(); ++other) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sums[i] += shared[i * kThreads + threadIdx.x + other * step];
    }
  }
}

template <class Args, int kTensors>
__device__ __forceinline__ void write_lse(const Args& args, const Tile<kTensors>& tile) {
  int const row = threadIdx.x;
  bool const exists =
      row < args.split.tile_rows && tile.first_row(args.split) + row < args.row_count;
  if (!exists || args.lse == nullptr) return;
  float const base = tile.base[row];
  args.lse[tile.lse_index[row]] = base == infinity() ? base : base + logf(tile.sum[row]);
}

template <class Dtype, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? 4 : 2)
    fwd_kernel(const __grid_constant__ FwdArgs<typename Dtype::Word> args) {
  using V = Vec<Dtype>;
  enum { kOuts, kOut, kTensors };
  __shared__ Tile<kTensors> tile;
  __shared__ float shared_sums[V::kElements * kThreads];
  ptx::griddepcontrol_launch_dependents();
  Split const split = args.split;
  ThreadCoordinate const at(split);
  int64_t const existing = args.row_count - tile.first_row(split);
  int const rows = existing < split.tile_rows ? static_cast<int>(existing) : split.tile_rows;

  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  tile.compute_rows(args, {&args.outs.strides, &args.out.strides});
  write_lse(args, tile);
  bool const one_window = args.parts <= split.window();
  if (one_window && !tile.rows_give_weights(args)) tile.compute_weights(args, 0);

  for (int first_row = 0; first_row < rows; first_row += kRowsAtOnce * split.row_step()) {
    auto row_of = [&](int r) { return first_row + at.row + r * split.row_step(); };
    for (int start = 0; start < args.head_dim; start += split.lanes() * V::kElements) {
      int const column = start + at.lane * V::kElements;
      float sums[kRowsAtOnce][V::kElements] = {};
      for (int first = 0; first < args.parts; first += split.window()) {
        if (!one_window) tile.compute_weights(args, first);
        int const end = min(args.parts - first, split.window());
        for (int step = at.group; step < end; step += kPartsAtOnce * split.groups()) {
          V vecs[kPartsAtOnce][kRowsAtOnce];
#pragma unroll
          for (int p = 0; p < kPartsAtOnce; ++p) {
            int const part = step + p * split.groups();
            const auto* const from = args.outs.part(first + min(part, end - 1)) + column;
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r) {
              int64_t const offset = tile.offset[kOuts][min(row_of(r), rows - 1)];
              bool const exists = part < end && row_of(r) < rows;
              vecs[p][r].template load<kAligned>(from + offset,
                                                 exists ? args.head_dim - column : 0);
            }
          }
#pragma unroll
          for (int p = 0; p < kPartsAtOnce; ++p) {
            int const part = step + p * split.groups();
            const float* const weights = tile.weights + min(part, end - 1) * split.tile_rows;
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r) {
              float const weight = part < end ? weights[min(row_of(r), rows - 1)] : 0.f;
              float values[V::kElements];
              vecs[p][r].unpack(values);
#pragma unroll
              for (int i = 0; i < V::kElements; ++i) {
                sums[r][i] = weight == 0.f ? sums[r][i] : fmaf(weight, values[i], sums[r][i]);
              }
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        add_groups(split, at.group, sums[r], shared_sums);
        if (row_of(r) >= rows || at.group != 0) continue;
        float const scale = tile.scale[row_of(r)];
#pragma unroll
        for (int i = 0; i < V::kElements; ++i) sums[r][i] *= scale;
        V out;
        out.pack(sums[r]);
        out.template store<kAligned>(args.out.data + tile.offset[kOut][row_of(r)] + column,
                                     args.head_dim - column);
      }
    }
  }
}

}  // namespace flashvar::merge_states
