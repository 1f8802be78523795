// Stands for src/cuda/ptx/global_store.cuh: a plain copy.
#pragma once
#include <cstring>

namespace flashvar::ptx {

template <class Words>
void global_store(void* global, Words words) {
  std::memcpy(global, &words, sizeof(words));
}

}  // namespace flashvar::ptx
