// Accesses of 2, 4, 8 and 16 bytes: fp32 reductions into global memory (of four elements: sm_90 and
// newer), and loads and stores of shared memory. The asm is volatile, so the compiler does not move
// them across barriers.
#pragma once
#include <cstdint>
#include <type_traits>

namespace flashvar::ptx {

// global[0..3] += {a, b, c, d}, each element atomically.
__device__ __forceinline__ void global_add(float* global, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Adds `a` to *global atomically where `valid`.
__device__ __forceinline__ void global_add(float* global, float a, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %2, 0;\n"
      "@p red.relaxed.gpu.global.add.f32 [%0], %1;\n"
      "}" ::"l"(global),
      "f"(a), "r"(static_cast<int>(valid))
      : "memory");
}

__device__ __forceinline__ void shared_store(uint32_t smem, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}
__device__ __forceinline__ void shared_store(uint32_t smem, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void shared_store(uint32_t smem, uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(smem), "h"(x) : "memory");
}
__device__ __forceinline__ void shared_store(uint32_t smem, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(x) : "memory");
}
__device__ __forceinline__ uint4 shared_load_words(uint32_t smem) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(smem)
               : "memory");
  return x;
}
__device__ __forceinline__ float shared_load(uint32_t smem) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(smem) : "memory");
  return x;
}
__device__ __forceinline__ float2 shared_load2(uint32_t smem) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(smem) : "memory");
  return x;
}
__device__ __forceinline__ float4 shared_load4(uint32_t smem) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(smem)
               : "memory");
  return x;
}

// Unlike the loads above it has no memory clobber: the compiler may move other accesses of memory
// across it, though not the load itself across other volatile asm. Value: float, uint32_t or
// uint16_t.
template <class Value>
__device__ __forceinline__ Value shared_load_unordered(uint32_t smem) {
  Value x;
  if constexpr (std::is_same_v<Value, float>) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(smem));
  } else if constexpr (std::is_same_v<Value, uint32_t>) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(smem));
  } else {
    static_assert(std::is_same_v<Value, uint16_t>);
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(smem));
  }
  return x;
}

}  // namespace flashvar::ptx
