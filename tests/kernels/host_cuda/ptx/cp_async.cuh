// Stands for src/cuda/ptx/cp_async.cuh: copies are made no sooner than a wait for them, which shows
// data that are read too early; in some blocks as soon as they are started, which shows data that
// are overwritten too early. A copy to where another one of the thread is still in flight ends the
// program.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace flashvar::ptx {

inline void make_copy(const Copy& copy) {
  if (copy.exists) {
    std::memcpy(copy.to, copy.from, copy.bytes);
  } else if (!copy.ends_group) {
    std::memset(copy.to, 0, copy.bytes);
  }
}
inline void start_copy(const Copy& started) {
  auto& copies = block->threads[threadIdx.x].copies;
  for (const Copy& copy : copies) {
    if (copy.bytes == 0 || copy.to != started.to) continue;
    std::fprintf(stderr, "thread %u of block %u copies to where a copy is in flight\n", threadIdx.x,
                 blockIdx.x);
    std::abort();
  }
  if (block->copies_at_once) make_copy(started);
  copies.push_back(started);
}
inline void cp_async_16(const void* shared, const void* gmem, bool valid) {
  if (valid) check_access(gmem, 16);
  start_copy({const_cast<void*>(shared), gmem, 16, valid, false});
}
template <int kBytes>
void cp_async(void* shared, const void* gmem) {
  check_access(gmem, kBytes);
  start_copy({shared, gmem, kBytes, true, false});
}
template <int kBytes>
void cp_async_part(uint32_t smem, const void* gmem, int bytes) {
  unsigned char* const to = shared_memory + smem;
  size_t const copied = static_cast<size_t>(bytes);
  start_copy({to, gmem, copied, true, false});
  start_copy({to + copied, nullptr, kBytes - copied, false, false});
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
    if (!block->copies_at_once) make_copy(copy);
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

}  // namespace flashvar::ptx
