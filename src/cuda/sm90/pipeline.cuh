// Producer-consumer pipelines: rings of buffers, and TMA loads of tiles.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "core/ceil_div.h"
#include "ptx/mbarrier.cuh"
#include "ptx/smem_address.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace flashvar::sm90 {

// Tiles in shared memory are stored as column blocks of 64 columns of 16 bits: 128-byte rows,
// SWIZZLE_128B.
inline constexpr int kColBlockCols = 64;

// Position in a ring of kStages buffers: the stage, and the parity of the mbarrier phase that fills
// it. One register. A consumer waits for full[stage] with phase(); the producer waits for
// empty[stage] with phase() ^ 1, which is complete at once in the first round.
template <int kStages>
struct PipelineState {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t phase() const { return count / kStages % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

// Number of column blocks that a row of so many columns takes. Kernels with clipped maps
// (clipped_map.h) load only these column blocks, and zero the others once. They must not load the
// others: TMA translates the map's base address even for a box wholly outside the tensor, and a
// clipped map's base lies in front of the tensor, where there may be no memory.
__device__ __forceinline__ int32_t col_blocks_of(int32_t columns) {
  return ceil_div(columns, kColBlockCols);
}

// Loads a tile from row `row` on of one head, all columns, by one elected lane of a converged warp.
// Completes on the mbarrier `full`.
template <int kColBlocks, int kColBlockBytes>
__device__ __forceinline__ void load_tile(uint32_t smem, const CUtensorMap* map, uint32_t full,
                                          ptx::CacheHint hint, int32_t row, uint32_t head,
                                          uint32_t batch) {
  if (!ptx::elect_one()) return;
  ptx::mbarrier_arrive_expect(full, kColBlocks * kColBlockBytes);
#pragma unroll
  for (int col_block = 0; col_block < kColBlocks; ++col_block) {
    ptx::tma_load_4d(smem + col_block * kColBlockBytes, map, full, hint, col_block * kColBlockCols,
                     row, head, batch);
  }
}

}  // namespace flashvar::sm90
