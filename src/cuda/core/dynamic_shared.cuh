// The dynamic shared memory of a block, which may be larger than the 48 KB of static arrays.
#pragma once

namespace flashvar {

// The dynamic shared memory as a Shared whose constructor has not run. The launch asks for
// sizeof(Shared) bytes.
template <class Shared>
__device__ __forceinline__ Shared& dynamic_shared() {
  static_assert(alignof(Shared) <= 16);
  extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
  return *reinterpret_cast<Shared*>(dynamic_shared_memory);
}

}  // namespace flashvar
