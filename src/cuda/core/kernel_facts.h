// What a compiled kernel needs, readable from the library's file without running it: one record per
// kernel in the section .flashvar.kernels, from which the manifest is written.
#pragma once
#include <cstdint>

namespace flashvar {

struct KernelFacts {
  char name[64];          // zero-terminated
  int32_t threads;        // per block
  int32_t shared_memory;  // dynamic, bytes per block
  int32_t tile[4];        // block sizes in the op's own order; 0 where unused

  static constexpr KernelFacts make(const char* name, int threads, int shared_memory, int tile0,
                                    int tile1 = 0) {
    KernelFacts facts{{}, threads, shared_memory, {tile0, tile1, 0, 0}};
    for (int i = 0; i < 63 && name[i] != '\0'; ++i) facts.name[i] = name[i];
    return facts;
  }
};

static_assert(sizeof(KernelFacts) == 88, "the manifest writer reads records of 88 bytes");

}  // namespace flashvar
