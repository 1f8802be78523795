// Parts of the backward's chains for both families: access to a record's vectors, images in the
// workspace, and operands made from dOut.
//
// The step of the reverse chain, from dS^T after a chunk to that before it (grad_chunk.h):
//   (R1) d = dS^T K^T
//   (R2) dU^T = b o d + dOut^T P
//   (R3) dV^T = beta o (dU^T - (beta o dU^T) (X o D))
//   (R4) dS^T = decay dS^T
//   (R5) dS^T += (c o dOut^T) Q
//   (R6) dS^T -= (a o dV^T) K
// and that of the chain of states, which writes R instead of out:
//   (S1) W^T = V^T - a o (S^T K^T)
//   (S2) R^T = W^T - (beta o W^T) (X o D)^T
//   (S3) S^T = decay S^T + (b o beta o R^T) K
// Each kernel writes them out, in an order of its own, because as functions the compiler emits
// other code for the whole loop. The numbers mark the lines.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/smem_layout.cuh"
#include "gated_delta_rule/chain_parts.cuh"
#include "gated_delta_rule/grad_chunk.h"
#include "gated_delta_rule/grad_tokens.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/vectors.cuh"

namespace flashvar::gated_delta_rule {

inline constexpr int kChainColumns = 64;

// The vectors of a record that chains load: a, b, c, decay and growth, beta.
using Vectors = VectorOffsets<GradRecord>;
inline constexpr int kVectorBeta = offsetof(GradRecord, beta) - offsetof(GradRecord, a);
inline constexpr int kChainVectorBytes = kVectorBeta + sizeof(GradRecord::beta);
static_assert(offsetof(GradRecord, a) % 16 == 0 && kChainVectorBytes % 16 == 0, "bulk copies");

// Indices of a chunk's record, and of its tile of columns of V, in the workspace; and what the
// workspace has of the tile.
struct TileIndices {
  int64_t record, tile;

  __device__ __forceinline__ TileIndices(const FwdProblem& problem, const Work& work, int32_t tiles,
                                         int32_t row)
      : record((work.first_chunk + row / kChunk) * problem.heads + work.head),
        tile(record * tiles + work.column / kChainColumns) {}

  __device__ __forceinline__ unsigned char* state(const GradWorkspace& workspace) const {
    return workspace.states + tile * workspace.state_bytes;
  }
  __device__ __forceinline__ unsigned char* grad_state(const GradWorkspace& workspace) const {
    return workspace.grad_states + tile * workspace.state_bytes;
  }
  __device__ __forceinline__ uint16_t* grad_values_low(const GradWorkspace& workspace) const {
    return reinterpret_cast<uint16_t*>(workspace.grad_values_low) + tile * (kChunk * kChainColumns);
  }
};

// First row of the last chunk; negative in an empty sequence.
__device__ __forceinline__ int32_t last_chunk(const Work& work) {
  return (work.span.count + kChunk - 1) / kChunk * kChunk - kChunk;
}

// Loads dOut^T of the warp's 16 columns of V as operand A.
__device__ __forceinline__ void load_transposed(uint32_t (&a)[4][4], uint32_t tile) {
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) ptx::ldmatrix_x4_trans(a[kk], transposed_address(tile, 2 * kk));
}

// Scales the columns of operand A by a vector of the record.
template <class Dtype>
__device__ __forceinline__ void scale_operand(uint32_t (&a)[4][4], uint32_t vector) {
  TokenFactors const factors(vector);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float2 const factor = factors.pairs[n];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t& pair = a[n / 2][n % 2 * 2 + half];
      pair = Dtype::pack(Dtype::unpack(static_cast<uint16_t>(pair)) * factor.x,
                         Dtype::unpack(static_cast<uint16_t>(pair >> 16)) * factor.y);
    }
  }
}

// Stores operand A, 16 rows x 16 kSteps columns of the warp, to an image of 64 rows.
template <int kSteps>
__device__ __forceinline__ void store_image(unsigned char* image, const uint32_t (&a)[kSteps][4]) {
  using Layout = SmemLayout<64, 16 * kSteps>;
  Lane const lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = 16 * lane.warp + lane.g + 8 * half;
#pragma unroll
    for (int first = 0; first < 2 * kSteps; first += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = a[(first + i) / 2][i % 2 * 2 + half];
      uint4 const unit = transpose_quad(words);
      int const column = first + lane.t;
      *reinterpret_cast<uint4*>(image + column / 8 * Layout::kColBlockBytes +
                                Layout::unit_offset(row, column % 8)) = unit;
    }
  }
}

// Packs the chunk's part in the gradient of the state, -a o dV^T, which overwrites `d`, dV^T. `a`:
// the vector's address.
template <class Dtype>
__device__ __forceinline__ void pack_removed(uint32_t (&packed)[4][4], float (&d)[32], uint32_t a) {
  TokenFactors(a).scale(d);
#pragma unroll
  for (float& value : d) value = -value;
  pack<Dtype>(packed, d);
}

// Packs the low part of accumulators: their rounding errors in 16 bits.
template <class Dtype, int kSteps>
__device__ __forceinline__ void pack_low(uint32_t (&low)[kSteps][4], const float (&d)[8 * kSteps]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    uint32_t const high = Dtype::pack(d[2 * i], d[2 * i + 1]);
    low[i / 4][i % 4] =
        Dtype::pack(d[2 * i] - Dtype::unpack(static_cast<uint16_t>(high)),
                    d[2 * i + 1] - Dtype::unpack(static_cast<uint16_t>(high >> 16)));
  }
}

// solve(), whose GEMM each family implements: d -= L d', for each row of the accumulators. L is X o
// D or its transpose, d' is d with columns scaled by beta.
//
// First step: packs d' as operand A, with the factors that pack_scaled() returns in `descale`.
__device__ __forceinline__ void start_solve(uint32_t (&packed)[4][4], float (&descale)[2],
                                            const float (&d)[32], uint32_t beta) {
  float scaled[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) scaled[i] = d[i];
  TokenFactors(beta).scale(scaled);
  pack_scaled(packed, scaled, descale);
}

// Careful chunks: overwrites X o D in shared memory with its low part. Called by the block's first
// `threads` threads, after a barrier behind which all of them have read X o D.
__device__ __forceinline__ void copy_solution_low(uint32_t matrix, const GradRecord& record,
                                                  int threads) {
  const auto* const low = reinterpret_cast<const uint4*>(record.solution_low);
  for (int i = static_cast<int>(threadIdx.x); i < kTriangleBytes / 16; i += threads) {
    ptx::shared_store(matrix + 16 * i, low[i]);
  }
}

// Last step: d -= descale o product, given the product of L and the packed d'.
__device__ __forceinline__ void finish_solve(float (&d)[32], const float (&product)[32],
                                             const float (&descale)[2]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) d[i] = fmaf(-descale[i / 2 % 2], product[i], d[i]);
}

// Stores x, rounded, and its low part to column `token` of two images, in row 16 warp + g + 8 half.
// One lane of the quad stores.
template <class Dtype>
__device__ __forceinline__ void put_element(unsigned char* image, int token, int half, float x,
                                            unsigned char* image_low) {
  Lane const lane(ptx::thread_index());
  if (lane.t != 0) return;
  int const row = 16 * lane.warp + lane.g + 8 * half;
  uint32_t const offset = Tile64::unit_offset(row, token / 8) + token % 8 * 2;
  auto const word = static_cast<uint16_t>(Dtype::pack(x, 0.f));
  *reinterpret_cast<uint16_t*>(image + offset) = word;
  *reinterpret_cast<uint16_t*>(image_low + offset) =
      static_cast<uint16_t>(Dtype::pack(x - Dtype::unpack(word), 0.f));
}

// Stores a value of dV to a tile [token][column] in shared memory, and its low part to the
// workspace. One lane of the quad stores.
template <class Dtype>
__device__ __forceinline__ void put_grad_value(uint32_t tile, int token, int half, float x,
                                               uint16_t* low) {
  Lane const lane(ptx::thread_index());
  if (lane.t != 0) return;
  int const column = 16 * lane.warp + lane.g + 8 * half;
  auto const word = static_cast<uint16_t>(Dtype::pack(x, 0.f));
  ptx::shared_store(element_address(tile, token, column), word);
  low[token * kChainColumns + column] =
      static_cast<uint16_t>(Dtype::pack(x - Dtype::unpack(word), 0.f));
}

}  // namespace flashvar::gated_delta_rule
