// griddepcontrol, for programmatic dependent launch (PDL): a grid launched with
// LaunchShape::programmatic may start before the preceding grid of the stream is complete (sm_90
// and newer; no-ops on older devices).
#pragma once

namespace flashvar::ptx {

// Allows the next grid of the stream to start, once every block of this grid has executed this or
// exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the preceding grid is complete and its writes are visible. Blocks without work have
// to wait, too: the next grid waits for this grid alone, so this grid must not be complete before
// the preceding one, whose writes the next grid may read.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashvar::ptx
