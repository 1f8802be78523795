// Attention sinks: one more score per row, the same for all rows of a head, of a key without a
// value. Its exponential joins the sum of the row: P and the output shrink, the LSE grows. It is
// added once, in the epilogue; main loops ignore it.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "core/any_dtype.cuh"
#include "core/math.cuh"

namespace flashvar::attention {

// The sink of a query head of the call, natural log; -inf: there is none.
__device__ __forceinline__ float sink_of(const SinksView& sinks, uint32_t head) {
  return sinks.data == nullptr ? -infinity() : load_value(sinks, head);
}

// Adds the sink to a finished row: to its LSE (natural log; -inf: the row sees no key), and to what
// its output is multiplied by. Both are computed relative to the larger of sink and LSE, so that
// nothing overflows.
__device__ __forceinline__ void add_sink(float sink, float& lse, float& inverse) {
  if (sink == -infinity()) return;
  float const smaller = exp2_approx(fabsf(sink - lse) * -kLog2E);
  float const share = __fdividef(1.f, 1.f + smaller);  // of the larger
  inverse *= sink > lse ? smaller * share : share;
  lse = fmaxf(sink, lse) + __logf(1.f + smaller);
}

}  // namespace flashvar::attention
