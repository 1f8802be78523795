// What the chains of both families share: a warp has 16 columns of the state of one head in
// registers, transposed. Rows of its accumulators, m16n8 tiles of mma.sync and wgmma alike, are
// columns of V, so that every product of the chain has its A operand in registers (an accumulator,
// packed) and its B operand in shared memory as it was loaded. No warp waits for another's results.
// chunk.h has the formulas; here
//   S^T K^T, S^T Q^T;  W^T = V^T - a o (S^T K^T);  U^T = W^T update^T
//   S^T = decay S^T + (b o U^T) K;  out^T = c o (S^T Q^T) + U^T P^T
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/math.cuh"
#include "core/quad.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/gates.cuh"
#include "gated_delta_rule/problem.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/special_registers.cuh"

namespace flashvar::gated_delta_rule {

// The work of a block: columns of V of one head of one sequence.
struct Work {
  uint32_t sequence, head, head_qk;
  int32_t column;  // first of V
  Span span;
  int64_t first_chunk;  // place of the sequence's first record
  int32_t batch;        // coordinate in dense tensors

  // `tiles`: of `columns` columns of V each. `block`: its number among those of a chain.
  __device__ __forceinline__ Work(const FwdProblem& problem, uint32_t tiles, int columns,
                                  uint32_t block = blockIdx.x) {
    uint32_t const row = block / tiles;
    column = static_cast<int32_t>(block - row * tiles) * columns;
    sequence = row / problem.heads;
    head = row - sequence * problem.heads;
    head_qk = head / problem.group;
    span = problem.rows.span(sequence);
    first_chunk = problem.rows.first_tile(sequence, kChunk);
    batch = problem.rows.offsets == nullptr ? static_cast<int32_t>(sequence) : 0;
  }
};

// Calls f(element of the thread's accumulators, address) for each that exists.
template <int kDim, class F>
__device__ __forceinline__ void each_of_state(const FwdProblem& problem, const State& state,
                                              const Work& work, int32_t column, F f) {
  Lane const lane;
  float* const data =
      state.data + work.sequence * state.sequence_stride + work.head * state.head_stride;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) {
    int32_t const v = column + 16 * lane.warp + lane.g + i / 2 % 2 * 8;
    int32_t const k = i / 4 * 8 + 2 * lane.t + i % 2;
    if (v < problem.head_dim_v && k < problem.head_dim) {
      f(i, data + k * state.k_stride + v * state.v_stride);
    }
  }
}

// Accumulators of 16 kSteps columns as operand A.
template <class Dtype, int kSteps>
__device__ __forceinline__ void pack(uint32_t (&a)[kSteps][4], const float (&d)[8 * kSteps]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) a[i / 4][i % 4] = Dtype::pack(d[2 * i], d[2 * i + 1]);
}

// From shared memory.
__device__ __forceinline__ float load_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address));
  return pair;
}

// A value of each token of the chunk, for the accumulator columns of the lane: 8 n + 2 t and the
// next.
struct TokenFactors {
  float2 pairs[8];

  // `vector`: its address.
  explicit __device__ __forceinline__ TokenFactors(uint32_t vector) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      pairs[n] = load_pair(vector + 4 * (8 * n + 2 * (threadIdx.x % 4)));
    }
  }

  // Multiplies the accumulators of 64 columns.
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

// Where a record's vectors lie behind a, its first.
template <class Record>
struct VectorOffsets {
  static constexpr int b = offsetof(Record, b) - offsetof(Record, a);
  static constexpr int c = offsetof(Record, c) - offsetof(Record, a);
  static constexpr int decay = offsetof(Record, decay) - offsetof(Record, a);
  static constexpr int growth = offsetof(Record, growth) - offsetof(Record, a);
};

// The lane's address in a tile of 64 tokens x 64 columns of V for ldmatrix or stmatrix, transposed:
// tokens 8 n to 8 n + 15 and the warp's 16 columns are one fragment of an accumulator's four tiles.
__device__ __forceinline__ uint32_t transposed(uint32_t tile, int n) {
  int const lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(threadIdx.x) / 32 % 4;
  int const token = 8 * n + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
  return tile + token * 128 + ((chunk ^ (token & 7)) * 16);
}

// The warp's 16 columns of a tile of V, transposed as accumulators lie.
struct ValueTile {
  uint32_t words[4][4];

  explicit __device__ __forceinline__ ValueTile(uint32_t tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::ldmatrix_x4_trans(words[i], transposed(tile, 2 * i));
  }

  // W^T in the place of S^T K^T: d = V^T - a o d.
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

// Operand A in fp16, whose digits W needs whatever the inputs are: each row times a power of two
// that takes its largest element to 2^10. The factors that undo it are in `undo`, for rows g and
// g + 8.
__device__ __forceinline__ void pack_scaled(uint32_t (&a)[4][4], const float (&d)[32],
                                            float (&undo)[2]) {
  constexpr uint32_t kExponent = 0x7f800000, kOne = 127u << 23, kTarget = 10u << 23;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      largest = fmaxf(largest, fabsf(d[i / 2 * 4 + 2 * half + i % 2]));
    }
    uint32_t exponent = __float_as_uint(quad_max(largest)) & kExponent;
    exponent = exponent > (32u << 23) ? exponent : (32u << 23);  // rows of zeros
    undo[half] = __uint_as_float(exponent - kTarget);
    float const scale = __uint_as_float(2 * kOne + kTarget - exponent);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      a[n / 2][n % 2 * 2 + half] =
          dtype::fp16::pack(d[4 * n + 2 * half] * scale, d[4 * n + 2 * half + 1] * scale);
    }
  }
}

template <int kElements>
__device__ __forceinline__ void scale_rows(float (&d)[kElements], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) d[i] *= factors[i / 2 % 2];
}

// Copies the warp's 16 columns of a tile [token][column of V] to memory where `rows` and `columns`
// of the tile exist.
__device__ __forceinline__ void copy_columns(uint16_t* to, int64_t stride, uint32_t tile,
                                             int32_t rows, int32_t columns) {
  __syncwarp();  // the warp's columns are there
  int const lane = static_cast<int>(threadIdx.x) % 32, warp = Lane().warp;
  int const chunk = 2 * warp + lane % 2;
  uint16_t* const out = to + 8 * chunk;
  bool const exists = 8 * chunk < columns;
#pragma unroll
  for (int first = 0; first < kChunk; first += 16) {
    int const token = first + lane / 2;
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(tile + token * 128 + ((chunk ^ (token & 7)) * 16)));
    if (exists && token < rows) *reinterpret_cast<uint4*>(out + token * stride) = words;
  }
}

// The same to the rows of a tensor like out.
__device__ __forceinline__ void copy_out(const FwdProblem& problem, const Tensor& out,
                                         const Work& work, uint32_t tile, int32_t row,
                                         int32_t column) {
  uint16_t* const to = out.data + work.batch * out.batch_stride +
                       (int64_t{work.span.first} + row) * out.seq_stride +
                       work.head * out.head_stride + column;
  copy_columns(to, out.seq_stride, tile, work.span.count - row, problem.head_dim_v - column);
}

// Stores out^T of the warp's 16 columns by way of `tile`, of which other warps use other columns.
// `put(n, words)` stores the four words of accumulator tiles n and n + 1 there, transposed.
template <class Dtype, class Put>
__device__ __forceinline__ void store_out(const FwdProblem& problem, const Work& work,
                                          const float (&d)[32], uint32_t tile, int32_t row,
                                          int32_t column, Put put) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Dtype::pack(d[4 * n + 2 * i], d[4 * n + 2 * i + 1]);
    put(n, words);
  }
  copy_out(problem, problem.out, work, tile, row, column);
}

// Element (token, column) of a tile in column blocks of 64 columns.
__device__ __forceinline__ uint32_t element_address(uint32_t tile, int token, int column) {
  int const in_block = column % 64;
  return tile + column / 64 * (kChunk * 128) + token * 128 + ((in_block / 8 ^ (token & 7)) * 16) +
         in_block % 8 * 2;
}

// Calls f(i, value) for the lane's elements of a row: element 8 n + 2 t is the 2 n-th, the next the
// one behind it, as they lie in the state's columns. Loaded each time: the state takes the
// registers.
template <class Dtype, int kDim, class F>
__device__ __forceinline__ void each_of_row(const Lane& lane, uint32_t tile, int token, F f) {
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    uint32_t pair;
    asm volatile("ld.shared.u32 %0, [%1];"
                 : "=r"(pair)
                 : "r"(element_address(tile, token, 8 * n + 2 * lane.t)));
    f(2 * n, Dtype::unpack(static_cast<uint16_t>(pair)));
    f(2 * n + 1, Dtype::unpack(static_cast<uint16_t>(pair >> 16)));
  }
}

// 1 / sqrt(sum of squares + 1e-6) of a row; 1 where rows are not normalised.
template <class Dtype, int kDim>
__device__ __forceinline__ float norm_of(const FwdProblem& problem, const Lane& lane, uint32_t tile,
                                         int token) {
  float sum = 0.f;
  each_of_row<Dtype, kDim>(lane, tile, token, [&](int, float x) { sum = fmaf(x, x, sum); });
  sum = quad_sum(sum);
  return problem.qk_l2norm ? rsqrtf(sum + 1e-6f) : 1.f;
}

// A chunk token by token, in fp32: the state, and out^T in V's tile.
template <class Dtype, int kDim>
__device__ __forceinline__ void step_by_tokens(const FwdProblem& problem, const Work& work,
                                               float (&state)[kDim / 2], uint32_t tile_k,
                                               uint32_t tile_q, uint32_t tile_v, int32_t row) {
  Lane const lane(ptx::thread_index());  // read late: the loop of usual chunks has the registers
  int32_t const count = min(work.span.count - row, kChunk);
  // Element i of a row meets this one of the state's row g + 8 half.
  auto const of_state = [&](int i, int half) -> float& {
    return state[i / 2 * 4 + 2 * half + i % 2];
  };
#pragma unroll 1
  for (int token = 0; token < count; ++token) {
    GatePlace const place{work.batch, int64_t{work.span.first} + row + token, work.head};
    float const decay = exp2_approx(decay_log(problem, place) * (1.f / kLn2));
    float const beta = beta_of(problem, place);
    float const norm = norm_of<Dtype, kDim>(problem, lane, tile_k, token);
    float known[2] = {}, out[2] = {}, update[2];
    each_of_row<Dtype, kDim>(lane, tile_k, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        of_state(i, half) *= decay;
        known[half] = fmaf(of_state(i, half), x, known[half]);
      }
    });
    int const column = 16 * lane.warp + lane.g;
    uint32_t const addresses[2] = {element_address(tile_v, token, column),
                                   element_address(tile_v, token, column + 8)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint16_t v;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(addresses[half]));
      update[half] = beta * (Dtype::unpack(v) - norm * quad_sum(known[half])) * norm;
    }
    each_of_row<Dtype, kDim>(lane, tile_k, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        of_state(i, half) = fmaf(update[half], x, of_state(i, half));
      }
    });
    float const factor = problem.scale * norm_of<Dtype, kDim>(problem, lane, tile_q, token);
    each_of_row<Dtype, kDim>(lane, tile_q, token, [&](int i, float x) {
#pragma unroll
      for (int half = 0; half < 2; ++half) out[half] = fmaf(of_state(i, half), x, out[half]);
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t const packed = Dtype::pack(factor * quad_sum(out[half]), 0.f);
      __syncwarp();  // the quad has read V's element
      if (lane.t == 0) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(addresses[half]),
                     "h"(static_cast<uint16_t>(packed))
                     : "memory");
      }
    }
  }
}

}  // namespace flashvar::gated_delta_rule
