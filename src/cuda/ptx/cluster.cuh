// Thread block clusters: their barrier, and loads from the shared memory of the cluster's CTAs.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

// All threads of the cluster that have not exited have called this, and what they had written to
// shared memory is visible to all of them. By whole warps.
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();  // the barrier is .aligned
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The address that `smem` has in the CTA of rank `cta`.
__device__ __forceinline__ uint32_t in_cta(uint32_t smem, uint32_t cta) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(cta));
  return address;
}

// Loads from an address of in_cta().
__device__ __forceinline__ float cluster_load(uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ float4 cluster_load4(uint32_t address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

}  // namespace flashvar::ptx
