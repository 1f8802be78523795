// Addresses in shared memory, as PTX instructions take them.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

__device__ __forceinline__ uint32_t smem_address(const void* generic) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(generic));
}

}  // namespace flashvar::ptx
