// Parts of the chain for both families. The chain is the inter-chunk recurrence: the loop that
// carries a head's state from chunk to chunk.
//
// Each warp holds S^T of 16 columns of V in registers, as accumulators (m16n8 tiles, the same in
// mma.sync and wgmma) whose rows are columns of V. Every GEMM of the chain then takes operand A
// from registers, a packed accumulator, and operand B from shared memory as it was loaded, and no
// warp needs another's results. chunk.h has the formulas; transposed they are
//   (F1) W^T = V^T - a o (S^T K^T)
//   (F2) U^T = W^T ((T o D) diag(beta))^T
//   (F3) out^T = c o (S^T Q^T) + U^T P^T
//   (F4) S^T = decay S^T + (b o U^T) K
// Each kernel that has a chain writes them out; these numbers mark the lines.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/math.cuh"
#include "core/quad.cuh"
#include "core/smem_layout.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/gates.cuh"
#include "gated_delta_rule/large_dim.h"
#include "gated_delta_rule/problem.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/vectors.cuh"

namespace flashvar::gated_delta_rule {

// 64 tokens x 64 columns of V, 64 columns of V x 64 tokens, or a square.
using Tile64 = SmemLayout<kChunk, kChunk>;

// Coordinate of a block in a grid of rows x heads x column tiles that is launched on one axis. A
// row is a sequence or a segment, depending on the kernel.
struct BlockCoordinate {
  uint32_t row, head, tile;

  __device__ __forceinline__ BlockCoordinate(const FwdProblem& problem, uint32_t tiles,
                                             uint32_t block = blockIdx.x) {
    uint32_t const rest = block / tiles;
    tile = block - rest * tiles;
    row = rest / problem.heads;
    head = rest - row * problem.heads;
  }
};

// The work of a block: a tile of columns of V, of one head of one sequence.
struct Work {
  uint32_t sequence, head, head_qk;
  int32_t column;  // first of V
  Span span;
  int64_t first_chunk;  // number of the first chunk (Sequences::find), which indexes records
  int32_t batch;        // batch index of dense tensors; 0: varlen

  // `tiles`: tiles of a head, of `columns` columns of V each. `block`: index among a chain's
  // blocks.
  __device__ __forceinline__ Work(const FwdProblem& problem, uint32_t tiles, int columns,
                                  uint32_t block = blockIdx.x)
      : Work(problem, BlockCoordinate(problem, tiles, block), columns) {}

 protected:
  __device__ __forceinline__ Work(const FwdProblem& problem, const BlockCoordinate& coordinate,
                                  int columns)
      : Work(problem, coordinate, coordinate.row, columns) {}

  __device__ __forceinline__ Work(const FwdProblem& problem, const BlockCoordinate& coordinate,
                                  uint32_t sequence_index, int columns)
      : sequence(sequence_index),
        head(coordinate.head),
        head_qk(head / problem.group),
        column(static_cast<int32_t>(coordinate.tile) * columns),
        span(problem.rows.span(sequence)),
        first_chunk(problem.rows.first_tile(sequence, kChunk) - problem.rows.first_tile(0, kChunk)),
        batch(problem.rows.offsets == nullptr ? static_cast<int32_t>(sequence) : 0) {
    first_chunk = max(first_chunk, int64_t{0});  // offsets may be inconsistent
  }
};

// Coordinate (v, k) in the state of accumulator element i of the thread, whose warpgroup starts at
// column `column` of V.
struct StateCoordinate {
  int32_t v, k;

  __device__ __forceinline__ StateCoordinate(const Lane& lane, int32_t column, int i)
      : v(column + 16 * lane.warp + lane.g + i / 2 % 2 * 8), k(i / 4 * 8 + 2 * lane.t + i % 2) {}
};

// Calls f(i, address) for each accumulator element i of the thread that lies within the state.
template <int kDim, class F>
__device__ __forceinline__ void for_each_state_element(const FwdProblem& problem,
                                                       const State& state, const Work& work,
                                                       int32_t column, F f) {
  Lane const lane;
  float* const data =
      state.data + work.sequence * state.sequence_stride + work.head * state.head_stride;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) {
    StateCoordinate const at(lane, column, i);
    if (at.v < problem.head_dim_v && at.k < problem.head_dim) {
      f(i, data + at.k * state.k_stride + at.v * state.v_stride);
    }
  }
}

// Loads a state, or its gradient, of the caller's; without one `state` keeps its values. (If this
// function set them to zero, the compiler would put those of head dim 256 into memory.)
template <int kDim>
__device__ __forceinline__ void load_state(const FwdProblem& problem, const State& from,
                                           const Work& work, int32_t column,
                                           float (&state)[kDim / 2]) {
  if (from.data == nullptr) return;
  for_each_state_element<kDim>(problem, from, work, column,
                               [&](int i, const float* element) { state[i] = *element; });
}

// Stores a state, or its gradient, if the caller wants it.
template <int kDim>
__device__ __forceinline__ void store_state(const FwdProblem& problem, const State& to,
                                            const Work& work, int32_t column,
                                            const float (&state)[kDim / 2]) {
  if (to.data == nullptr) return;
  for_each_state_element<kDim>(problem, to, work, column,
                               [&](int i, float* element) { *element = state[i]; });
}

// Packs accumulators of 16 kSteps columns into operand A.
template <class Dtype, int kSteps>
__device__ __forceinline__ void pack(uint32_t (&a)[kSteps][4], const float (&d)[8 * kSteps]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) a[i / 4][i % 4] = Dtype::pack(d[2 * i], d[2 * i + 1]);
}

// A vector with one value per token of the chunk, as factors of accumulator columns: pairs[n] are
// those of the lane's columns 8 n + 2 t and 8 n + 2 t + 1.
struct TokenFactors {
  float2 pairs[8];

  // `vector`: its shared-memory address.
  explicit __device__ __forceinline__ TokenFactors(uint32_t vector) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      pairs[n] = ptx::shared_load2(vector + 4 * (8 * n + 2 * (threadIdx.x % 4)));
    }
  }

  // Scales the 64 columns of accumulators.
  __device__ __forceinline__ void scale(float (&d)[32]) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      d[4 * n] *= pairs[n].x;
      d[4 * n + 1] *= pairs[n].y;
      d[4 * n + 2] *= pairs[n].x;
      d[4 * n + 3] *= pairs[n].y;
    }
  }
};

// Byte offsets of a record's vectors from its first one, a.
template <class Record>
struct VectorOffsets {
  static constexpr int b = offsetof(Record, b) - offsetof(Record, a);
  static constexpr int c = offsetof(Record, c) - offsetof(Record, a);
  static constexpr int decay = offsetof(Record, decay) - offsetof(Record, a);
  static constexpr int growth = offsetof(Record, growth) - offsetof(Record, a);
};

// The lane's address for ldmatrix.trans or stmatrix.trans in a tile of 64 tokens x 64 columns of V.
// The instruction's four matrices are tokens 8 n to 8 n + 15 by the warp's 16 columns.
__device__ __forceinline__ uint32_t transposed_address(uint32_t tile, int n) {
  int const lane_id = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) / 32 % 4;
  int const token = 8 * n + lane_id / 16 * 8 + lane_id % 8, unit = 2 * warp + lane_id / 8 % 2;
  return tile + Tile64::unit_offset(token, unit);
}

// The warp's 16 columns of a tile of V, transposed into the layout of accumulators.
struct ValueTile {
  uint32_t words[4][4];

  explicit __device__ __forceinline__ ValueTile(uint32_t tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::ldmatrix_x4_trans(words[i], transposed_address(tile, 2 * i));
  }

  // Turns S^T K^T into W^T: d = V^T - a o d.
  template <class Dtype>
  __device__ __forceinline__ void subtract(float (&d)[32], const TokenFactors& a) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const v = words[n / 2][n % 2 * 2 + half];
        float* const mine = d + 4 * n + 2 * half;
        mine[0] = fmaf(-a.pairs[n].x, mine[0], Dtype::unpack(static_cast<uint16_t>(v)));
        mine[1] = fmaf(-a.pairs[n].y, mine[1], Dtype::unpack(static_cast<uint16_t>(v >> 16)));
      }
    }
  }
};

// Packs operand A in fp16, for bf16 inputs too: W needs fp16's 11 bits of precision. To stay in the
// range of fp16 each row is scaled by a power of two that brings its largest element to 2^10 to
// 2^11. `descale`: the inverse factors of rows g and g + 8.
__device__ __forceinline__ void pack_scaled(uint32_t (&a)[4][4], const float (&d)[32],
                                            float (&descale)[2]) {
  constexpr uint32_t kExponent = 0x7f800000, kOne = 127u << 23, kTarget = 10u << 23;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      largest = fmaxf(largest, fabsf(d[i / 2 * 4 + 2 * half + i % 2]));
    }
    uint32_t exponent = __float_as_uint(quad_max(largest)) & kExponent;
    // At least 2^-95, so that both factors are finite for rows of zeros too.
    exponent = exponent > (32u << 23) ? exponent : (32u << 23);
    descale[half] = __uint_as_float(exponent - kTarget);
    float const scale = __uint_as_float(2 * kOne + kTarget - exponent);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      a[n / 2][n % 2 * 2 + half] =
          dtype::fp16::pack(d[4 * n + 2 * half] * scale, d[4 * n + 2 * half + 1] * scale);
    }
  }
}

// Multiplies a state, or its gradient, by the chunk's decay.
template <int kElements>
__device__ __forceinline__ void decay_state(float (&state)[kElements], float decay) {
#pragma unroll
  for (float& value : state) value *= decay;
}

template <int kElements>
__device__ __forceinline__ void scale_rows(float (&d)[kElements], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) d[i] *= factors[i / 2 % 2];
}

// Copies the warp's 16 columns of a tile [token][column of V] to global memory: the first `rows`
// rows and `columns` columns of the tile.
__device__ __forceinline__ void copy_columns(uint16_t* to, int64_t stride, uint32_t tile,
                                             int32_t rows, int32_t columns) {
  __syncwarp();  // all lanes have written the warp's columns
  int const lane_id = static_cast<int>(threadIdx.x) % 32, warp = Lane().warp;
  int const unit = 2 * warp + lane_id % 2;
  uint16_t* const out = to + 8 * unit;
  bool const exists = 8 * unit < columns;
#pragma unroll
  for (int first = 0; first < kChunk; first += 16) {
    int const token = first + lane_id / 2;
    uint4 const words = ptx::shared_load_words(tile + token * 128 + ((unit ^ (token & 7)) * 16));
    if (exists && token < rows) *reinterpret_cast<uint4*>(out + token * stride) = words;
  }
}

// copy_columns() to the chunk's rows of a tensor shaped like out.
__device__ __forceinline__ void copy_out(const FwdProblem& problem, const Tensor& out,
                                         const Work& work, uint32_t tile, int32_t row,
                                         int32_t column) {
  uint16_t* const to = out.data + work.batch * out.batch_stride +
                       (int64_t{work.span.first} + row) * out.seq_stride +
                       work.head * out.head_stride + column;
  copy_columns(to, out.seq_stride, tile, work.span.count - row, problem.head_dim_v - column);
}

// Address of element (token, column) of a tile that is stored in column blocks of 64 columns.
__device__ __forceinline__ uint32_t element_address(uint32_t tile, int token, int column) {
  int const in_block = column % 64;
  return tile + column / 64 * Tile64::kColBlockBytes + Tile64::unit_offset(token, in_block / 8) +
         in_block % 8 * 2;
}

// Calls f(i, value) for the lane's elements of a row of q or k, in the order of the state's
// accumulator columns: i = 2 n is element 8 n + 2 t, and i = 2 n + 1 the next. The row is read anew
// at each use, because the state occupies the registers.
template <class Dtype, int kDim, class F>
__device__ __forceinline__ void for_each_row_element(const Lane& lane, uint32_t tile, int token,
                                                     F f) {
  // Element 2 t. The others' addresses follow from it without further registers, of which
  // large states leave few.
  uint32_t const first = tile + token * 128 + (token & 7) * 16 + 4 * lane.t;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    uint32_t const address = kLargeDim<kDim> ? (first ^ (n % 8 * 16)) + n / 8 * (kChunk * 128)
                                             : element_address(tile, token, 8 * n + 2 * lane.t);
    auto const pair = ptx::shared_load_unordered<uint32_t>(address);
    f(2 * n, Dtype::unpack(static_cast<uint16_t>(pair)));
    f(2 * n + 1, Dtype::unpack(static_cast<uint16_t>(pair >> 16)));
  }
}

// 1 / sqrt(sum of squares + 1e-6) of a row; 1 where rows are not normalized.
template <class Dtype, int kDim>
__device__ __forceinline__ float norm_of(const FwdProblem& problem, const Lane& lane, uint32_t tile,
                                         int token) {
  float sum = 0.f;
  for_each_row_element<Dtype, kDim>(lane, tile, token,
                                    [&](int, float x) { sum = fmaf(x, x, sum); });
  sum = quad_sum(sum);
  return problem.qk_l2norm ? rsqrtf(sum + 1e-6f) : 1.f;
}

// Computes a chunk token by token, in fp32: updates the state and, with kOutput, overwrites V's
// tile with out.
template <class Dtype, int kDim, bool kOutput = true>
__device__ __forceinline__ void step_by_tokens(const FwdProblem& problem, const Work& work,
                                               float (&state)[kDim / 2], uint32_t tile_k,
                                               uint32_t tile_q, uint32_t tile_v, int32_t row) {
  Lane const lane(ptx::thread_index());  // read again: keeps no register across the main loop
  int32_t const count = min(work.span.count - row, kChunk);
  // The state's element that multiplies element i of a row, for the state's row g + 8 half.
  auto const state_element = [&](int i, int half) -> float& {
    return state[i / 2 * 4 + 2 * half + i % 2];
  };
#pragma unroll 1
  for (int token = 0; token < count; ++token) {
    GateCoordinate const coordinate{work.batch, int64_t{work.span.first} + row + token, work.head};
    float const decay = exp2_approx(decay_log(problem, coordinate) * kLog2E);
    float const beta = beta_of(problem, coordinate);
    float const norm = norm_of<Dtype, kDim>(problem, lane, tile_k, token);
    float predicted[2] = {}, out[2] = {}, update[2];  // predicted: S^T k
    for_each_row_element<Dtype, kDim>(lane, tile_k, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state_element(i, half) *= decay;
        predicted[half] = fmaf(state_element(i, half), x, predicted[half]);
      }
    });
    int const column = 16 * lane.warp + lane.g;
    uint32_t const addresses[2] = {element_address(tile_v, token, column),
                                   element_address(tile_v, token, column + 8)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto const v = ptx::shared_load_unordered<uint16_t>(addresses[half]);
      update[half] = beta * (Dtype::unpack(v) - norm * quad_sum(predicted[half])) * norm;
    }
    for_each_row_element<Dtype, kDim>(lane, tile_k, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state_element(i, half) = fmaf(update[half], x, state_element(i, half));
      }
    });
    if constexpr (!kOutput) continue;
    float const factor = problem.scale * norm_of<Dtype, kDim>(problem, lane, tile_q, token);
    for_each_row_element<Dtype, kDim>(lane, tile_q, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) out[half] = fmaf(state_element(i, half), x, out[half]);
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t const packed = Dtype::pack(factor * quad_sum(out[half]), 0.f);
      __syncwarp();  // all lanes of the quad have read V's element, which out overwrites
      if (lane.t == 0) {
        ptx::shared_store(addresses[half], static_cast<uint16_t>(packed));
      }
    }
  }
}

}  // namespace flashvar::gated_delta_rule
