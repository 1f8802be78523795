// Tile sizes of the wgmma family's backward, chosen from the head dim.
#pragma once
#include "core/target.h"
#include "sm90/config.cuh"

namespace flashvar::sm90 {

// What a copy of the kernel is made for.
enum class BwdPurpose {
  kDense,     // one length for all sequences
  kRagged,    // lengths that the device alone knows; the others serve them too
  kOrdered,   // dQ is added up in the order of the keys, so that it is the same every time
  kFeatures,  // ScoreFeatures but for a bias
  kOrderedFeatures,
};

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
  int scores;   // buffers of dS
};

// clang-format off
inline constexpr AttentionBwdTile kAttentionBwdTiles[] = {
    { 64, Sharing::kKeys,     128, 3, 2},
    {128, Sharing::kKeys,      64, 2, 3},
    {256, Sharing::kProducts,  64, 2, 1},
};
// clang-format on

constexpr AttentionBwdTile attention_bwd_tile(int head_dim) {
  for (const AttentionBwdTile& tile : kAttentionBwdTiles) {
    if (head_dim <= tile.max_head_dim) return tile;
  }
  return {};
}

// What the products take for a head dim: steps of wgmma, but half pages where little is to win, and
// whole pages where sums are large. Missing columns are zeros.
constexpr int product_dim(int head_dim) {
  int const step = head_dim <= kPageCols       ? kPageCols / 2
                   : head_dim <= 2 * kPageCols ? kPageCols / 4
                                               : kPageCols;
  return (head_dim + step - 1) / step * step;
}

template <class Target, class Dtype_, int kHeadDim_, int kHeadDimV_, BwdPurpose kPurpose>
struct AttentionBwdConfig {
  using Dtype = Dtype_;
  static constexpr bool kRagged = kPurpose != BwdPurpose::kDense;
  static constexpr bool kOrdered =
      kPurpose == BwdPurpose::kOrdered || kPurpose == BwdPurpose::kOrderedFeatures;
  static constexpr bool kFeatures =
      kPurpose == BwdPurpose::kFeatures || kPurpose == BwdPurpose::kOrderedFeatures;
  static constexpr AttentionBwdTile kTile =
      attention_bwd_tile(kHeadDim_ > kHeadDimV_ ? kHeadDim_ : kHeadDimV_);
  static constexpr bool kSharesKeys = kTile.sharing == Sharing::kKeys;
  static constexpr int kHeadDim = product_dim(kHeadDim_);
  static constexpr int kHeadDimV = product_dim(kHeadDimV_);
  static constexpr int kPages = (kHeadDim + kPageCols - 1) / kPageCols;
  static constexpr int kPagesV = (kHeadDimV + kPageCols - 1) / kPageCols;
  static constexpr int kBlockQ = kTile.block_q;
  static constexpr int kBlockKV = kSharesKeys ? 128 : 64;
  static constexpr int kConsumers = 2;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // A warpgroup computes 64 rows of dQ: half of them, or half of their columns.
  static constexpr bool kSplitsRows = kBlockQ == 128;
  static constexpr int kGradQCols = kSplitsRows ? kHeadDim : kTile.max_head_dim / 2;
  static constexpr int kGradQElements = 64 * kGradQCols;  // of a warpgroup
  // Behind both parts: how many warps have added theirs, where that is counted.
  static constexpr int kTileElements = 2 * kGradQElements + (kOrdered ? 4 : 0);
  static_assert(kBlockQ == 128 || kBlockQ == 64, "two warpgroups share dQ");

  static constexpr int kPageBytesQ = kBlockQ * 128;
  static constexpr int kPageBytesKV = kBlockKV * 128;
  static constexpr int kBytesQ = kPages * kPageBytesQ;
  static constexpr int kBytesGradOut = kPagesV * kPageBytesQ;
  static constexpr int kPagesK = kSplitsRows ? kPages : kTile.max_head_dim / kPageCols;  // dQ's too
  static constexpr int kBytesK = kPagesK * kPageBytesKV;
  static constexpr int kBytesV = kPagesV * kPageBytesKV;
  static constexpr int kRowBytes = kBlockQ * 4;  // of LSE and of D
  static constexpr int kBytesScores = kBlockQ * kBlockKV * 2;
  static constexpr int kScoreStages = kTile.scores;
  static constexpr int kBytesWeights = kSharesKeys ? 0 : kBlockQ * kBlockKV * 4;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kSharedMemory =
      kBarrierBytes + kBytesK + kBytesV + kStages * (kBytesQ + kBytesGradOut) +
      kScoreStages * kBytesScores + kBytesWeights + 2 * kStages * kRowBytes;
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit a block");
};

}  // namespace flashvar::sm90
