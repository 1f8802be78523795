// Stands for src/cuda/ptx/tma.cuh: loads of boxes of 64 columns, with SWIZZLE_128B.
#pragma once
#include <cuda.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "device.h"
#include "ptx/mbarrier.cuh"

namespace flashvar::ptx {

enum class CacheHint { kNormal, kEvictFirst, kEvictLast };

// `rows`: of 128 bytes.
inline void load_box(uint32_t smem, const CUtensorMap& map, const std::array<int32_t, 5>& first,
                     int32_t rows) {
  for (int32_t row = 0; row < rows; ++row) {
    int64_t offset = 0;
    bool exists = true;
    int32_t rest = row;
    for (int i = 1; i < 5; ++i) {
      int32_t const at = first[i] + rest % static_cast<int32_t>(map.box[i]);
      rest /= static_cast<int32_t>(map.box[i]);
      exists = exists && at >= 0 && at < static_cast<int64_t>(map.dims[i]);
      offset += at * static_cast<int64_t>(map.strides[i - 1]);
    }
    for (int32_t c = 0; c < 64; ++c) {
      int32_t const column = first[0] + c;
      uint16_t word = 0;
      if (exists && column >= 0 && column < static_cast<int64_t>(map.dims[0])) {
        std::memcpy(&word, map.data + offset + column * 2, 2);
      }
      int32_t const unit = c / 8 ^ row % 8;
      std::memcpy(shared_memory + smem + row * 128 + unit * 16 + c % 8 * 2, &word, 2);
    }
  }
}

inline void tma_load(uint32_t smem, const CUtensorMap& map, uint32_t barrier,
                     const std::array<int32_t, 5>& first) {
  if (smem % 1024 != 0) std::abort();
  int32_t rows = 1;
  for (int i = 1; i < 5; ++i) rows *= static_cast<int32_t>(map.box[i]);
  mbarriers.at(barrier).start([=] {
    load_box(smem, map, first, rows);
    mbarriers.at(barrier).count(0, -128 * rows);
  });
}
inline void tma_load_4d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, CacheHint,
                        int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  if (map->rank != 4) std::abort();
  tma_load(smem, *map, barrier, {c0, c1, c2, c3, 0});
}
inline void tma_load_5d(uint32_t smem, const CUtensorMap* map, uint32_t barrier, CacheHint,
                        int32_t c0, int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  if (map->rank != 5) std::abort();
  tma_load(smem, *map, barrier, {c0, c1, c2, c3, c4});
}

inline void fence_async_proxy() {}

}  // namespace flashvar::ptx
