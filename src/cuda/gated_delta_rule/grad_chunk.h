// GradRecord and GradWorkspace: what the kernels of the backward pass on for each chunk of 64
// tokens and each head. Notation: chunk.h.
//
// With N the strictly lower triangle of K K^T, the backward uses X = N (I + diag(beta) N)^-1, for
// which T = I - diag(beta) X. X has no factor beta at either end, so that beta = 0 has a gradient,
// and X serves both directions:
//   R = W - (X o D) diag(beta) W     residuals: U = diag(beta) R
//   dV = diag(beta) (dU - (X o D)^T diag(beta) dU)
// where dU = P^T dOut + diag(b) K dS, and dS is the gradient of the state after the chunk. The
// other gradients follow from E = dV R^T and F = dOut R^T, and from products with S and dS: the
// gradient of A o D is -E diag(beta) below the diagonal, divided by the row's beta.
#pragma once
#include <cstdint>

#include "gated_delta_rule/chunk.h"

namespace flashvar::gated_delta_rule {

// Here `growth` is the largest sum of squares of a row of I - (X o D) diag(beta), the matrix that
// turns W into R: independent rounding errors of W grow by its root. Where keys have length 1 and
// beta is at most 1 it is at most 2, whatever the keys; with equal keys it is 2 / (2 - beta). Above
// kCarefulGrowth a chunk is careful: its 16-bit matrices are stored as two, high part and low part
// (the rounding error of the high part). Above kMaxGradGrowth it is computed token by token, in
// fp32.
inline constexpr float kCarefulGrowth = 2.25f;
inline constexpr float kMaxGradGrowth = 8.f;
// Largest element of X that is stored in fp16.
inline constexpr float kLargestSolution = 16384.f;

// Matrices are swizzled as in ChunkRecord.
struct GradRecord {
  uint16_t solution[kTriangleElements];  // X o D, in fp16
  uint16_t scores[kTriangleElements];    // P, in the dtype of q
  float a[kChunk], b[kChunk], c[kChunk];
  float decay, growth;
  float unused[kChunk - 2];
  float beta[kChunk];  // 0 beyond the sequence
  float sums[kChunk];  // G / ln 2
  float norm_q[kChunk], norm_k[kChunk];
  uint16_t solution_low[kTriangleElements];  // low part of X o D; careful chunks only
};
static_assert(sizeof(GradRecord) == 20 * 1024);

// Bytes of a Tile64. An image is an operand in the workspace as it lies in shared memory:
// in column blocks, swizzled as by SWIZZLE_128B.
inline constexpr int kTile64Bytes = kChunk * kChunk * 2;

// Sums per token, from which gates_kernel computes the gradients of gates and beta. GateSumsByWarp,
// their parts by warps in each family, says what each is the sum of.
struct GateSums {
  float gates[kChunk], later[kChunk], columns[kChunk];
  float states;
  float unused[kChunk - 1];
};

// The workspace of a backward. Dimensions: slot, one per chunk that was launched for; tile, 64
// columns of V.
struct GradWorkspace {
  GradRecord* records;           // [slot][head]
  unsigned char* states;         // [slot][head][tile]: image of S^T before the chunk, 64 x K
  unsigned char* grad_states;    // likewise of dS^T after the chunk
  unsigned char* residuals;      // [slot][head][tile]: image of R^T, 64 x 64
  unsigned char* residuals_low;  // low part of R^T; careful chunks only
  // [slot][head][tile]: low part of dV, [token][column], not swizzled; careful chunks only.
  unsigned char* grad_values_low;
  GateSums* sums;       // [slot][head]; above head dim 128 rows_kernel's fp32 dQ and dK follow
  float* grad_a_log;    // [slot][head]: the chunk's contribution
  float* grad_dt_bias;  // likewise
  int32_t tiles;
  int32_t state_bytes;  // of a tile's state
};

}  // namespace flashvar::gated_delta_rule
