// From the layout of accumulators to rows of 16 bytes.
#pragma once
#include <cstdint>

#include "ptx/special_registers.cuh"

namespace flashvar {

// A quad's lanes hold two columns each of four neighbouring mma tiles; afterwards lane i holds all
// eight columns of tile i.
__device__ __forceinline__ uint4 transpose_quad(uint32_t (&word)[4]) {
  int const lane = ptx::thread_index() % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    bool const upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      uint32_t const sent = upper ? word[i] : word[i | bit];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, sent, bit);
      (upper ? word[i] : word[i | bit]) = received;
    }
  }
  return {word[0], word[1], word[2], word[3]};
}

}  // namespace flashvar
