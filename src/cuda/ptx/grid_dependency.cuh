// Grids that start before the one ahead of them in the stream is complete, where they were launched
// so (sm_90 and newer; on older devices nothing is to be said).
#pragma once

namespace flashvar::ptx {

// The grid behind may start as soon as all blocks of this one have said so, or are done.
__device__ __forceinline__ void release_next_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The grid ahead is complete, and what it wrote can be read.
__device__ __forceinline__ void await_last_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashvar::ptx
