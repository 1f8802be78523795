// Stands for src/cuda/ptx/global_store.cuh: a plain copy.
#pragma once
#include <cstring>

#include "device.h"

namespace flashvar::ptx {

template <class Words>
void global_store(void* global, Words words) {
  check_access(global, sizeof(words));
  std::memcpy(global, &words, sizeof(words));
}

}  // namespace flashvar::ptx
