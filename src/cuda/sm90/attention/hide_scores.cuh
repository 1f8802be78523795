// hide_scores(): the mask loop of all wgmma kernels, whatever the type and orientation of their
// scores.
#pragma once
#include <cstdint>

namespace flashvar::sm90::attention {

// Calls hide(n, half, e) for the scores that a thread has of one row (`half`: which of its two
// rows) at columns outside [begin, end): element e of mma tile n. begin and end are relative to the
// thread's first column, so that unrolled code compares them with constants.
template <int kMmaCols, class Hide>
__device__ __forceinline__ void hide_scores(int half, int32_t begin, int32_t end, Hide&& hide) {
#pragma unroll
  for (int n = 0; n < kMmaCols; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int const column = 8 * n + e;
      if (column < begin || column >= end) hide(n, half, e);
    }
  }
}

}  // namespace flashvar::sm90::attention
