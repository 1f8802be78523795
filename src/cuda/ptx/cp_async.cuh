// cp.async: copies from global to shared memory that bypass registers (sm_80 and newer).
#pragma once
#include <cstdint>

#include "ptx/smem_address.cuh"

namespace flashvar::ptx {

// Copies 16 bytes; where `valid` is false, writes 16 zeros and reads nothing.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem, bool valid) {
  int const source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
               "r"(source_bytes)
               : "memory");
}

// Copies 4, 8 or 16 bytes.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* gmem) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem_address(shared)),
                 "l"(gmem)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(smem_address(shared)),
                 "l"(gmem), "n"(kBytes)
                 : "memory");
  }
}

// Writes kBytes (4 or 16), the first `bytes` of them copied, the others zeros. Reads nothing else.
template <int kBytes>
__device__ __forceinline__ void cp_async_part(uint32_t smem, const void* gmem, int bytes) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(smem), "l"(gmem),
                 "n"(kBytes), "r"(bytes)
                 : "memory");
  }
}

// Closes the thread's open group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the kPending newest of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashvar::ptx
