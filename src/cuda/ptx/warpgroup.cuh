// Instructions of warpgroups: setmaxnreg, named barriers and elect (sm_90 and newer).
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// Lowers (dec) or raises (inc) the number of registers per thread of the calling warpgroup; all
// four warps execute it. inc waits until other warpgroups have given up enough. ptxas ignores both
// (warning C7508) unless the kernel's launch bounds name the blocks per SM.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barriers of `threads` threads: sync waits for all of them, arrive does not wait. Barrier 0
// is that of __syncthreads().
__device__ __forceinline__ void named_barrier_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// True in one lane of the calling warp. Precondition: the warp is converged.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace flashvar::ptx
