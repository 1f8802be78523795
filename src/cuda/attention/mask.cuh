// The attention mask: causal and sliding windows, and the ends of sequences. A key that a query
// attends to is "visible" to it, the others are "hidden". Kernels evaluate the mask of single
// scores in boundary tiles only (hides_any), so that other tiles pay one uniform branch.
#pragma once
#include <cstdint>

#include "attention/problem.h"

namespace flashvar::attention {

// Key j is visible to query i iff diagonal(i) - left <= j <= diagonal(i) + right.
struct Mask {
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t left;
  int32_t right;

  // The key on the diagonal of query i. Aligned to the bottom right: the last query's diagonal is
  // the last key. Queries past the end (padding of a tile) use that of the last query.
  __device__ __forceinline__ int32_t diagonal(int32_t i) const {
    return min(i, seqlen_q - 1) + seqlen_k - seqlen_q;
  }

  // Keys [key_begin(i), key_end(i)) are visible to query i; the range may be empty.
  __device__ __forceinline__ int32_t key_begin(int32_t i) const {
    return left == kUnbounded ? 0 : max(diagonal(i) - left, 0);
  }
  __device__ __forceinline__ int32_t key_end(int32_t i) const {
    return right == kUnbounded ? seqlen_k : max(min(diagonal(i) + right + 1, seqlen_k), 0);
  }

  // Key j is visible to queries [query_begin(j), query_end(j)); the range may be empty.
  __device__ __forceinline__ int32_t query_begin(int32_t j) const {
    return right == kUnbounded ? 0 : max(j - right - seqlen_k + seqlen_q, 0);
  }
  __device__ __forceinline__ int32_t query_end(int32_t j) const {
    if (left == kUnbounded) return seqlen_q;
    return max(
        static_cast<int32_t>(min(int64_t{j} + left - seqlen_k + seqlen_q + 1, int64_t{seqlen_q})),
        0);
  }

  // Whether some key of [first_key, end_key) is hidden from some query of [first_query,
  // last_query]: whether the tile needs the mask.
  __device__ __forceinline__ bool hides_any(int32_t first_query, int32_t last_query,
                                            int32_t first_key, int32_t end_key) const {
    return end_key > key_end(first_query) || first_key < key_begin(last_query);
  }
};

}  // namespace flashvar::attention
