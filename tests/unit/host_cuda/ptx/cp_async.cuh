// Stands for src/cuda/ptx/cp_async.cuh: copies are made no sooner than a wait for them.
#pragma once
#include <cstring>

#include "device.h"

namespace flashvar::ptx {

inline void cp_async_16(const void* shared, const void* gmem, bool valid) {
  if (valid) check_access(gmem, 16);
  block->threads[threadIdx.x].copies.push_back({const_cast<void*>(shared), gmem, 16, valid, false});
}
template <int kBytes>
void cp_async(void* shared, const void* gmem) {
  check_access(gmem, kBytes);
  block->threads[threadIdx.x].copies.push_back({shared, gmem, kBytes, true, false});
}
template <int kBytes>
void cp_async_part(uint32_t smem, const void* gmem, int bytes) {
  unsigned char* const to = shared_memory + smem;
  size_t const copied = static_cast<size_t>(bytes);
  auto& copies = block->threads[threadIdx.x].copies;
  copies.push_back({to, gmem, copied, true, false});
  copies.push_back({to + copied, nullptr, kBytes - copied, false, false});
}
inline void cp_async_commit() {
  block->threads[threadIdx.x].copies.push_back({nullptr, nullptr, 0, false, true});
}
template <int kPending>
void cp_async_wait() {
  auto& copies = block->threads[threadIdx.x].copies;
  int groups = 0;
  for (const Copy& copy : copies) groups += copy.ends_group;
  size_t done = 0;
  for (; groups > kPending; ++done) {
    const Copy& copy = copies[done];
    groups -= copy.ends_group;
    if (copy.exists) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else if (!copy.ends_group) {
      std::memset(copy.to, 0, copy.bytes);
    }
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

}  // namespace flashvar::ptx
