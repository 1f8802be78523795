// Copies from shared to global memory by one warp: bulk copies where the architecture has them
// (sm_90 and newer), elsewhere through registers.
#pragma once
#include <cstdint>

#include "ptx/bulk.cuh"
#include "ptx/smem_address.cuh"
#include "ptx/tma.cuh"

namespace flashvar {

// Starts to copy what the warp's lanes have written. Both addresses: multiples of 16 bytes.
template <int kBytes>
__device__ __forceinline__ void start_warp_copy(void* global, const unsigned char* shared) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
#if __CUDA_ARCH__ >= 900
  ptx::fence_async_proxy();  // the copy reads what the lane has written
  __syncwarp();              // all lanes have written
  if (lane == 0) {
    ptx::bulk_store(global, ptx::smem_address(shared), kBytes);
    ptx::bulk_commit();
  }
#else
  static_assert(kBytes % 512 == 0, "whole steps of a warp");
  __syncwarp();  // all lanes have written
#pragma unroll
  for (int i = 0; i < kBytes / 16; i += 32) {
    static_cast<uint4*>(global)[i + lane] = reinterpret_cast<const uint4*>(shared)[i + lane];
  }
#endif
}

// Waits until all copies that the warp has started have read shared memory, which may then be
// overwritten. They may not have written global memory yet. Must be called before the warp exits:
// the shared memory of a block that has exited is given to another block.
__device__ __forceinline__ void finish_warp_copies() {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<0>();
#endif
  __syncwarp();  // lane 0 has waited; without bulk copies: all lanes have read
}

}  // namespace flashvar
