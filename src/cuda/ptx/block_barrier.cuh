// Barrier 0 without the convergence rule of __syncthreads(): warps may execute different bar.sync
// instructions (warps that skip key blocks wait in a loop of their own).
#pragma once

namespace flashvar::ptx {

__device__ __forceinline__ void block_barrier_sync() { asm volatile("bar.sync 0;" ::: "memory"); }

}  // namespace flashvar::ptx
