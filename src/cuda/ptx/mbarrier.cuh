// mbarrier: barriers in shared memory that count arrivals of threads and bytes of asynchronous
// copies (sm_90 and newer). A phase completes when all expected arrivals and bytes have arrived.
// Phases are told apart by their parity, 0 for the first. A barrier is 8 bytes.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// `arrivals`: how many complete a phase.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the async proxy (TMA).
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to the number that the current phase expects of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete. In a barrier's first phase, the phase
// before it counts as complete: waiting for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace flashvar::ptx
