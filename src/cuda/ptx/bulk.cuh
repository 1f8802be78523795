// cp.async.bulk: asynchronous copies of contiguous bytes between global and shared memory (sm_90
// and newer). Addresses and sizes are multiples of 16 bytes.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// Copies global to shared memory; completes on the mbarrier `barrier`, whose current phase must
// expect the bytes.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies shared to global memory; belongs to the thread's open bulk group.
__device__ __forceinline__ void bulk_store(void* global, uint32_t smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(smem), "r"(bytes)
               : "memory");
}
// Closes the thread's open bulk group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the thread's kPending newest groups have read shared memory, which may then
// be overwritten.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all of the thread's groups are complete.
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace flashvar::ptx
