// Tile sizes of the wgmma family's backward, chosen from the head dim.
#pragma once
#include "core/target.h"
#include "sm90/config.cuh"

namespace flashvar::sm90 {

// How two consumer warpgroups share a block's work.
enum class Sharing {
  kKeys,      // each owns 64 keys, with dK and dV of theirs
  kProducts,  // of the same 64 keys, the first computes S and dV, the second dP and dK
};

struct AttentionBwdTile {
  int max_head_dim;  // serves head dims up to this, of queries and of values
  Sharing sharing;
  int block_q;  // queries of one step of the loop
  int stages;   // buffers of Q, and of dO
  bool bulk;    // dQ is added by the copy engine, else by the threads
};

// clang-format off
inline constexpr AttentionBwdTile kAttentionBwdTiles[] = {
    { 64, Sharing::kKeys,     128, 2, true},
    {128, Sharing::kKeys,      64, 2, true},
    {256, Sharing::kProducts,  64, 2, false},
};
// clang-format on

constexpr AttentionBwdTile attention_bwd_tile(int head_dim) {
  for (const AttentionBwdTile& tile : kAttentionBwdTiles) {
    if (head_dim <= tile.max_head_dim) return tile;
  }
  return {};
}

template <class Target, class Dtype_, int kHeadDim_, int kHeadDimV_>
struct AttentionBwdConfig {
  using Dtype = Dtype_;
  static constexpr AttentionBwdTile kTile =
      attention_bwd_tile(kHeadDim_ > kHeadDimV_ ? kHeadDim_ : kHeadDimV_);
  static constexpr bool kSharesKeys = kTile.sharing == Sharing::kKeys;
  static constexpr bool kBulk = kTile.bulk;
  static constexpr int kHeadDim = kTile.max_head_dim;  // of both; missing columns are zeros
  static constexpr int kPages = kHeadDim / kPageCols;
  static constexpr int kBlockQ = kTile.block_q;
  static constexpr int kBlockKV = kSharesKeys ? 128 : 64;
  static constexpr int kConsumers = 2;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // A warpgroup computes 64 rows of dQ: half of them, or half of their columns.
  static constexpr bool kSplitsRows = kBlockQ == 128;
  static constexpr int kGradQCols = kSplitsRows ? kHeadDim : kHeadDim / 2;
  static constexpr int kGradQElements = 64 * kGradQCols;  // of a warpgroup
  static_assert(kBlockQ == 128 || kBlockQ == 64, "two warpgroups share dQ");

  static constexpr int kPageBytesQ = kBlockQ * 128;
  static constexpr int kPageBytesKV = kBlockKV * 128;
  static constexpr int kBytesQ = kPages * kPageBytesQ;
  static constexpr int kBytesKV = kPages * kPageBytesKV;
  static constexpr int kRowBytes = kBlockQ * 4;  // of LSE and of D
  static constexpr int kBytesScores = kBlockQ * kBlockKV * 2;
  static constexpr int kScoreStages = kSharesKeys ? 3 : 1;
  static constexpr int kBytesWeights = kSharesKeys ? 0 : kBlockQ * kBlockKV * 4;
  static constexpr int kBytesGradQ = kBulk ? kConsumers * kGradQElements * 4 : 0;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kSharedMemory = kBarrierBytes + 2 * kBytesKV + 2 * kStages * kBytesQ +
                                       kScoreStages * kBytesScores + kBytesWeights + kBytesGradQ +
                                       2 * kStages * kRowBytes;
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit a block");
};

}  // namespace flashvar::sm90
