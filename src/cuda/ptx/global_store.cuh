// Stores of 16 bytes as one access: the compiler may split those of C++.
#pragma once
#include <cstdint>

namespace flashvar::ptx {

__device__ __forceinline__ void global_store(void* global, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

}  // namespace flashvar::ptx
