// What the generated translation unit of each kernel names: its target, the types that its axes
// spell, and the kernel facts that the manifest is written from.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <cstdint>

#include "abi/mambassm.h"

namespace mambassm {

template <int kArchitecture_, int kSharedMemory_>
struct Target {
  static constexpr int kArchitecture = kArchitecture_;  // 10 * major + minor
  static constexpr int kSharedMemory = kSharedMemory_;  // bytes one block may have
};

namespace dtype {
struct fp32 {
  using Element = float;
  static constexpr unsigned kAbi = MAMBASSM_FP32;
};
struct fp16 {
  using Element = at::Half;
  static constexpr unsigned kAbi = MAMBASSM_FP16;
};
struct bf16 {
  using Element = at::BFloat16;
  static constexpr unsigned kAbi = MAMBASSM_BF16;
};
struct complex64 {
  using Element = c10::complex<float>;
  static constexpr unsigned kAbi = MAMBASSM_COMPLEX64;
};
}  // namespace dtype

namespace weight_dtype = dtype;

struct KernelFacts {
  char row[64];     // of the kernel table; zero-terminated, as all texts
  char kernel[32];  // of the op's kernels; these have one, and one family
  char family[16];
  char when[160];
  int32_t threads;        // per block
  int32_t shared_memory;  // dynamic, bytes per block
  int32_t tile[4];        // block sizes; 0 where unused
};

constexpr KernelFacts facts_of(const char* name, int threads, int shared_memory, int tile) {
  KernelFacts facts{{}, {}, {}, {}, threads, shared_memory, {tile, 0, 0, 0}};
  for (int i = 0; i < 63 && name[i] != '\0'; ++i) facts.row[i] = name[i];
  return facts;
}

}  // namespace mambassm
