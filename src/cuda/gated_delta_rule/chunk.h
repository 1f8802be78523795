// ChunkRecord: what the prepare kernel computes of each chunk of 64 tokens and each head, for the
// kernel that goes through the chunks in order (Yang et al., 2024, "Gated Delta Networks"; here the
// inverse does not contain the gates).
//
// With G_i the sum of the gates up to token i of the chunk, D_ij = exp(G_i - G_j) for i >= j, else
// 0, and S the state before the chunk:
//   A = strictly lower triangle of diag(beta) K K^T, T = (I + A)^-1
//   W = V - diag(a) K S               a_i = exp(G_i)
//   U = (T o D) diag(beta) W          the tokens' updates of the state
//   out = diag(c) Q S + P U           c_i = scale exp(G_i), P = scale (Q K^T o D)
//   S' = decay S + K^T diag(b) U      b_i = exp(G_last - G_i), decay = exp(G_last)
// Where q and k are normalized, A, P, a, b and c contain the rows' factors: no normalized copy of q
// or k is stored.
//
// In these and all formulas of this op's sources o is the elementwise product. With a vector, a
// value per token, a o Y multiplies the rows of Y where rows are tokens, and the columns of a
// transposed matrix, where columns are.
//
// `growth` is the infinity norm (largest sum of absolute values of a row) of (T o D) diag(beta).
// Where keys are nearly equal and beta is near 2, the updates grow along the chunk and cancel in
// the state, so that 16-bit operands would lose the state's digits. Chunks above kMaxGrowth are
// therefore computed token by token, in fp32. With equal keys the norm is below 3 for beta up to 1,
// and 128 for beta 2.
#pragma once
#include <cstdint>

namespace flashvar::gated_delta_rule {

inline constexpr int kChunk = 64;
inline constexpr float kMaxGrowth = 32.f;

// Matrices are lower triangular: of 64 x 64 elements of 16 bits three quarters are stored, laid out
// and swizzled as in triangle.cuh. Copied into shared memory as they are, they are operands of
// ldmatrix or wgmma.
inline constexpr int kTriangleElements = kChunk * kChunk * 3 / 4;
inline constexpr int kTriangleBytes = 2 * kTriangleElements;
struct ChunkRecord {
  uint16_t solution[kTriangleElements];  // (T o D) diag(beta), fp16; used up to kMaxGrowth only
  uint16_t scores[kTriangleElements];    // P, in the dtype of q
  float a[kChunk], b[kChunk], c[kChunk];
  float decay, growth;
  float unused[kChunk - 2];
};
// A multiple of 1 KiB, so that every part of every record is aligned for bulk copies (16 bytes).
static_assert(sizeof(ChunkRecord) == 13 * 1024);

}  // namespace flashvar::gated_delta_rule
