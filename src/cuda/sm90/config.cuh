// Tile sizes of the wgmma family, chosen from the head dim.
#pragma once
#include "core/target.h"

namespace flashvar::sm90 {

struct AttentionFwdTile {
  int max_head_dim;  // serves head dims up to this
  int block_kv;      // keys and values of one step of the loop
  int consumers;     // warpgroups, each owns 64 query rows
  int stages;        // buffers of K, and of V
};

// clang-format off
inline constexpr AttentionFwdTile kAttentionFwdTiles[] = {
    { 64, 128, 3, 2},
    { 96, 128, 2, 2},
    {128, 128, 2, 2},
    {192,  96, 2, 2},
    {256,  80, 2, 2},
};
// clang-format on

inline constexpr int kPageCols = 64;  // 128 bytes: one row of a swizzled page

constexpr AttentionFwdTile attention_fwd_tile(int head_dim) {
  for (const AttentionFwdTile& tile : kAttentionFwdTiles) {
    if (head_dim <= tile.max_head_dim) return tile;
  }
  return {};
}

template <class Target, class Dtype_, int kMaxHeadDim>
struct AttentionFwdConfig {
  using Dtype = Dtype_;
  static constexpr AttentionFwdTile kTile = attention_fwd_tile(kMaxHeadDim);
  static constexpr int kHeadDim = kMaxHeadDim <= 64 ? 64 : kTile.max_head_dim;
  static constexpr int kPages = (kHeadDim + kPageCols - 1) / kPageCols;
  static constexpr int kBlockQ = 64 * kTile.consumers;
  static constexpr int kBlockKV = kTile.block_kv;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // What setmaxnreg deals out of an SM's 65,536 registers.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

  static constexpr int kPageBytesQ = kBlockQ * 128;
  static constexpr int kPageBytesKV = kBlockKV * 128;
  static constexpr int kBytesQ = kPages * kPageBytesQ;
  static constexpr int kBytesKV = kPages * kPageBytesKV;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kSharedMemory = kBarrierBytes + kBytesQ + 2 * kStages * kBytesKV;
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit a block");
};

}  // namespace flashvar::sm90
