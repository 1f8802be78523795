// Sizes of the forward for few rows (fwd_few.cuh), and its shared memory.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "ptx/mbarrier.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::attention {

inline constexpr int kFewWarps = 4;    // that compute
inline constexpr int kMaxCluster = 8;  // blocks of a cluster: CUDA's largest portable size

// Number of the named barrier of those warps.
enum : uint32_t { kFewResults = 1 };

// kRows: rows of a tile, 8, 16 or 32.
template <class Target, class Dtype_, int kHeadDim_, int kHeadDimV_, int kRows>
struct FewConfig {
  using Dtype = Dtype_;
  static constexpr bool kSplits = true;  // for QueryTile
  static constexpr int kHeadDim = ceil_div(kHeadDim_, 16) * 16;
  static constexpr int kHeadDimV = ceil_div(kHeadDimV_, 16) * 16;
  static constexpr int kBlockQ = kRows;
  // A warp has up to 16 rows. It shares a block's keys with the other warps of its rows.
  static constexpr int kWarpRows = std::min(kRows, 16);
  static constexpr int kKeyWarps = kFewWarps * kWarpRows / kRows;
  // Keys of a step. Measured (docs/hopper-ledger.md, "A kernel for few rows"): fewer between 64
  // and 128, where rows are not whole lines of memory, and above 128, where three stages of more
  // would not fit. With 32 rows always, so that a warp has 32 of them.
  static constexpr int kLargest = std::max(kHeadDim, kHeadDimV);
  static constexpr int kBlockKV = kRows <= 16 && (kLargest <= 64 || kLargest == 128) ? 128 : 64;
  static constexpr int kThreads = 32 * (kFewWarps + 1);
  static constexpr int kMaxStages = 3;  // buffers of K, and of V
  // The most blocks that share an SM, as registers allow without a spill.
  static constexpr int kBlocksPerSM = kLargest <= (kRows == 8 ? 128 : 96)    ? 3
                                      : kLargest <= (kRows == 8 ? 256 : 128) ? 2
                                                                             : 1;

  static constexpr int kColBlocks = ceil_div(kHeadDim, kColBlockCols);
  static constexpr int kColBlocksV = ceil_div(kHeadDimV, kColBlockCols);
  static constexpr int kColBlockBytesQ = kBlockQ * 128;
  static constexpr int kColBlockBytesKV = kBlockKV * 128;
  static constexpr int kBytesQ = kColBlocks * kColBlockBytesQ;
  static constexpr int kBytesK = kColBlocks * kColBlockBytesKV;
  static constexpr int kBytesV = kColBlocksV * kColBlockBytesKV;
  static constexpr int kStageBytes = kBytesK + kBytesV;
  static constexpr int kBarrierBytes = 1024;
  // The results of a warp, and of all of them with those of the block (FewResults).
  static constexpr int kPitch = kHeadDimV + 4;  // rows begin in other banks
  static constexpr int kWarpResults = kWarpRows * (kPitch + 4) * 4;
  static constexpr int kBytesResults = kFewWarps * kWarpResults + kRows * (kPitch + 4) * 4;

  static constexpr int shared_memory(int stages) {
    return kBarrierBytes + kBytesQ + std::max(stages * kStageBytes, kBytesResults);
  }
  // The most stages with which so many blocks fit an SM.
  static constexpr int stages_that_fit(int blocks) {
    int stages = kMaxStages;
    while (stages > 1 && Target::blocks_that_fit(shared_memory(stages)) < blocks) --stages;
    return stages;
  }
};

// mbarriers, Q, then stages of K and V; in their place the results.
template <class Config>
struct FewSmem {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base + Config::kBarrierBytes; }
  __device__ __forceinline__ uint32_t k(uint32_t stage) const {
    return q() + Config::kBytesQ + stage * Config::kStageBytes;
  }
  __device__ __forceinline__ uint32_t v(uint32_t stage) const { return k(stage) + Config::kBytesK; }
  // full: the tile is loaded. empty: all warps have read it.
  __device__ __forceinline__ uint32_t full_q() const { return base; }
  __device__ __forceinline__ uint32_t full_k(uint32_t stage) const { return ring(0, stage); }
  __device__ __forceinline__ uint32_t empty_k(uint32_t stage) const { return ring(1, stage); }
  __device__ __forceinline__ uint32_t full_v(uint32_t stage) const { return ring(2, stage); }
  __device__ __forceinline__ uint32_t empty_v(uint32_t stage) const { return ring(3, stage); }
  __device__ __forceinline__ uint32_t results() const { return k(0); }

  // By one thread: a warp that does it in parallel takes 0.4 us longer.
  __device__ __forceinline__ void init_barriers() const {
    ptx::mbarrier_init(full_q(), 1);
    for (uint32_t stage = 0; stage < Config::kMaxStages; ++stage) {
      ptx::mbarrier_init(full_k(stage), 1);
      ptx::mbarrier_init(full_v(stage), 1);
      ptx::mbarrier_init(empty_k(stage), kFewWarps);
      ptx::mbarrier_init(empty_v(stage), kFewWarps);
    }
    ptx::mbarrier_init_fence();
  }

 private:
  __device__ __forceinline__ uint32_t ring(int which, uint32_t stage) const {
    return base + 8 + (which * Config::kMaxStages + stage) * 8;
  }
};

}  // namespace flashvar::sm90::attention
