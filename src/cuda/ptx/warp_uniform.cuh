// warp_uniform(): a value that is the same in all lanes of a warp, made known as such to the
// compiler by a shuffle. The compiler then keeps it, and what it computes from it, in uniform
// registers, where descriptors of wgmma belong, and saves registers of every lane.
#pragma once

namespace flashvar::ptx {

// Called by all lanes of the warp. Value: a 32-bit integer.
template <class Value>
__device__ __forceinline__ Value warp_uniform(Value value) {
  static_assert(sizeof(Value) == 4, "one shuffle");
  return __shfl_sync(0xffffffffu, value, 0);
}

}  // namespace flashvar::ptx
