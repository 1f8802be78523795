// The block's barrier for warps that may wait for it at different places of the program, as
// __syncthreads() may not.
#pragma once

namespace flashvar::ptx {

__device__ __forceinline__ void block_barrier_sync() { asm volatile("bar.sync 0;" ::: "memory"); }

}  // namespace flashvar::ptx
