// Stands for src/cuda/ptx/vectors.cuh: loads and stores of shared memory, whose addresses are
// multiples of their sizes.
#pragma once
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace flashvar::ptx {

template <class Words>
Words shared_load_unordered(uint32_t smem) {
  if (smem % sizeof(Words) != 0) std::abort();
  Words words;
  std::memcpy(&words, shared_memory + smem, sizeof(words));
  return words;
}
inline float shared_load(uint32_t smem) { return shared_load_unordered<float>(smem); }
inline float2 shared_load2(uint32_t smem) { return shared_load_unordered<float2>(smem); }
inline float4 shared_load4(uint32_t smem) { return shared_load_unordered<float4>(smem); }
inline uint4 shared_load_words(uint32_t smem) { return shared_load_unordered<uint4>(smem); }

template <class Words>
void shared_store(uint32_t smem, Words words) {
  if (smem % sizeof(Words) != 0) std::abort();
  std::memcpy(shared_memory + smem, &words, sizeof(words));
}
inline void shared_store(uint32_t smem, float a, float b, float c, float d) {
  shared_store(smem, float4{a, b, c, d});
}

}  // namespace flashvar::ptx
