// Unsigned division by a divisor that the host knows at launch: a multiply-high and a shift on the
// device, which has no integer divide instruction.
#pragma once
#include <cstdint>

namespace flashvar {

// quotient = (number * multiplier) >> (32 + shift), exact for numbers below 2^31 and divisors from
// 1 to 2^31 - 1 (Granlund and Montgomery, 1994).
struct Divisor {
  uint32_t multiplier, shift;  // multiplier 0: the divisor is 1

  static Divisor make(uint32_t value) {
    uint32_t log2 = 0;
    while ((uint64_t{1} << log2) < value) ++log2;
    if (log2 == 0) return {0, 0};
    uint64_t const power = uint64_t{1} << (31 + log2);
    return {static_cast<uint32_t>((power + value - 1) / value), log2 - 1};
  }

  __device__ __forceinline__ friend uint32_t operator/(uint32_t number, const Divisor& divisor) {
    return divisor.multiplier == 0 ? number : __umulhi(number, divisor.multiplier) >> divisor.shift;
  }
};

}  // namespace flashvar
