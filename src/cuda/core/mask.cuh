// Which keys a query sees. Masks are evaluated on boundary blocks only; `hides_any` says which
// those are, so that the body of the loop pays one uniform branch.
#pragma once
#include <cstdint>

namespace flashvar {

struct Mask {
  int32_t seqlen_q;
  int32_t seqlen_k;
  bool causal;  // key j is visible to query i iff j <= i + seqlen_k - seqlen_q

  // Query i sees keys [0, visible_end(i)). Queries past the end see what the last one sees.
  __device__ __forceinline__ int32_t visible_end(int32_t i) const {
    if (!causal || i >= seqlen_q) return seqlen_k;
    return max(i + 1 - seqlen_q + seqlen_k, 0);
  }

  // Whether a query at or after `first_query` does not see all of keys [0, key_end).
  __device__ __forceinline__ bool hides_any(int32_t first_query, int32_t key_end) const {
    return key_end > visible_end(first_query);
  }
};

}  // namespace flashvar
