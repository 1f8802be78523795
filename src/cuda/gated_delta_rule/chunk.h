// What the first kernel of the gated delta rule writes for each chunk of 64 tokens and each head,
// and the second reads (Yang et al., 2024, "Gated Delta Networks"; the inverse without its gate).
//
// With G_i the sum of the gates up to token i of the chunk, D_ij = exp(G_i - G_j) for i >= j, else
// 0, and S the state before the chunk:
//   A = the part of diag(beta) K K^T below the diagonal, T = (I + A)^-1
//   W = V - diag(a) K S               a_i = exp(G_i)
//   U = (T o D) diag(beta) W          the tokens' updates of the state
//   out = diag(c) Q S + P U           c_i = scale exp(G_i), P = scale (Q K^T o D)
//   S' = decay S + K^T diag(b) U      b_i = exp(G_last - G_i), decay = exp(G_last)
// Where q and k are normalised, the rows' factors are part of A, P, a, b and c: no normalised copy
// of q or k exists.
//
// Where keys are nearly equal and beta is near 2, updates grow along the chunk and cancel in the
// state, and 16-bit operands would lose its digits. `growth`, the largest sum of absolute values of
// a row of the first matrix, tells; above kMostGrowth a chunk goes token by token in fp32. Such
// sums are below 3 for beta up to 1 and equal keys, and 128 for beta 2.
#pragma once
#include <cstdint>

namespace flashvar::gated_delta_rule {

inline constexpr int kChunk = 64;
inline constexpr float kMostGrowth = 32.f;

// Matrices are 64 x 64 16-bit elements, in rows of 128 bytes permuted as by SWIZZLE_128B: what a
// kernel that copies the record into shared memory gives to ldmatrix or wgmma.
struct ChunkRecord {
  uint16_t update[kChunk * kChunk];  // (T o D) diag(beta), in fp16: at most kMostGrowth where used
  uint16_t scores[kChunk * kChunk];  // P, in the dtype of q
  float a[kChunk], b[kChunk], c[kChunk];
  float decay, growth;
  float unused[kChunk - 2];
};
static_assert(sizeof(ChunkRecord) == 17 * 1024);

}  // namespace flashvar::gated_delta_rule
