// What the generated translation unit of each kernel names: its target, the types that its axes
// spell, and the kernel facts that the manifest is written from.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "abi/vecadd.h"

namespace vecadd {

template <int kArchitecture_, int kSharedMemory_>
struct Target {
  static constexpr int kArchitecture = kArchitecture_;  // 10 * major + minor
  static constexpr int kSharedMemory = kSharedMemory_;  // bytes one block may have
};

namespace dtype {
struct fp32 {
  using Element = float;
  static constexpr unsigned kAbi = VECADD_FP32;
};
struct fp16 {
  using Element = __half;
  static constexpr unsigned kAbi = VECADD_FP16;
};
}  // namespace dtype

struct KernelFacts {
  char row[64];     // of the kernel table; zero-terminated, as all texts
  char kernel[32];  // of the op's kernels; these have one, and one family
  char family[16];
  char when[160];
  int32_t threads;        // per block
  int32_t shared_memory;  // dynamic, bytes per block
  int32_t tile[4];        // block sizes; 0 where unused
};

}  // namespace vecadd
