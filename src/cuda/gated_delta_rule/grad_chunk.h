// What the kernels of the backward of the gated delta rule hand on for each chunk of 64 tokens and
// each head. Names are those of chunk.h.
//
// T is I - diag(beta) X, where X = K K^T's part below the diagonal, times the inverse of
// I + (that part) diag(beta), has no factor beta at either end. One matrix serves both directions,
// and beta of 0 has a gradient:
//   R = W - (X o D) diag(beta) W     what W lacks of V token by token; U = diag(beta) R
//   dV = diag(beta) (dU - (X o D)^T diag(beta) dU)
// With dS the gradient of the state after the chunk, dU = P^T dOut + diag(b) K dS. For the other
// gradients E = dV R^T and F = dOut R^T are enough, beside products with S and dS: the gradient of
// A o D is -E diag(beta) below the diagonal, divided by beta of the row.
#pragma once
#include <cstdint>

#include "gated_delta_rule/chunk.h"

namespace flashvar::gated_delta_rule {

// Here `growth` is the largest sum of absolute values of a row of (X o D) diag(beta), and 1. Above
// kCarefulGrowth matrices of 16 bits come in two, the second being what rounding leaves; above
// kMostGradGrowth a chunk goes token by token in fp32.
inline constexpr float kCarefulGrowth = 2.25f;
inline constexpr float kMostGradGrowth = 8.f;
// X's largest element in fp16.
inline constexpr float kLargestInverse = 16384.f;

// Matrices as in ChunkRecord.
struct GradRecord {
  uint16_t inverse[kChunk * kChunk];  // X o D, in fp16
  uint16_t scores[kChunk * kChunk];   // P, in the dtype of q
  float a[kChunk], b[kChunk], c[kChunk];
  float decay, growth;
  float unused[kChunk - 2];
  float beta[kChunk];  // 0 beyond the sequence
  float sums[kChunk];  // G, in log2 units
  float norm_q[kChunk], norm_k[kChunk];
  uint16_t inverse_low[kChunk * kChunk];  // what is left of X o D; written where it is read
};
static_assert(sizeof(GradRecord) == 26 * 1024);

// Images of tiles in workspace: rows of 128 bytes permuted as by SWIZZLE_128B, in column blocks.
inline constexpr int kSquareBytes = kChunk * kChunk * 2;

// What the gradients of gates and beta are made of, by tokens.
struct GateSums {
  float gates[kChunk], kept[kChunk], columns[kChunk];
  float states;
  float unused[kChunk - 1];
};

// The workspace of a backward. Slots are chunks; tiles are of 64 columns of V.
struct GradWorkspace {
  GradRecord* records;             // [slot][head]
  unsigned char* states;           // [slot][head][tile]: S^T before the chunk, 64 x K
  unsigned char* grad_states;      // likewise: dS^T after it
  unsigned char* residuals;        // [slot][head][tile]: R^T, 64 x 64
  unsigned char* residuals_low;    // likewise: what rounding left, in careful chunks
  unsigned char* grad_values_low;  // likewise: of dV, [token][column], not permuted
  GateSums* sums;                  // [slot][head]
  float* grad_a_log;               // [slot][head], a chunk's part
  float* grad_dt_bias;             // likewise
  int32_t tiles;
  int32_t state_bytes;  // of a tile's state
};

}  // namespace flashvar::gated_delta_rule
