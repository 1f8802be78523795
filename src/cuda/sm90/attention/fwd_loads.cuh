// TMA loads of the forward's tiles, by the load warp.
#pragma once
#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::attention {

// As load_tile(), with all columns moved to the right by `shift`.
template <int kColBlocks, int kColBlockBytes>
__device__ __forceinline__ void load_moved_tile(uint32_t smem, const CUtensorMap* map,
                                                uint32_t full, ptx::CacheHint hint, int32_t row,
                                                uint32_t head, uint32_t batch, int32_t shift) {
  if (!ptx::elect_one()) return;
  ptx::mbarrier_arrive_expect(full, kColBlocks * kColBlockBytes);
#pragma unroll
  for (int col_block = 0; col_block < kColBlocks; ++col_block) {
    ptx::tma_load_4d(smem + col_block * kColBlockBytes, map, full, hint,
                     col_block * kColBlockCols - shift, row, head, batch);
  }
}

// As load_tile() of Q, through a map of TensorMapEncoder::members().
template <class Config>
__device__ __forceinline__ void load_members(uint32_t smem, const CUtensorMap* map, uint32_t full,
                                             int32_t query, uint32_t head, uint32_t batch) {
  if (!ptx::elect_one()) return;
  ptx::mbarrier_arrive_expect(full, Config::kBytesQ);
#pragma unroll
  for (int col_block = 0; col_block < Config::kColBlocks; ++col_block) {
    ptx::tma_load_5d(smem + col_block * Config::kColBlockBytesQ, map, full,
                     ptx::CacheHint::kEvictFirst, col_block * kColBlockCols, 0, query, head, batch);
  }
}

}  // namespace flashvar::sm90::attention
