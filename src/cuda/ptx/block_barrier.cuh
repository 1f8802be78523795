// bar.sync 0, the barrier of all threads of a block. Unlike __syncthreads(), whose instruction all
// threads must reach, it may be executed by different instructions of different warps: warps that
// skip key blocks wait in a loop of their own.
#pragma once

namespace flashvar::ptx {

__device__ __forceinline__ void block_barrier_sync() { asm volatile("bar.sync 0;" ::: "memory"); }

}  // namespace flashvar::ptx
