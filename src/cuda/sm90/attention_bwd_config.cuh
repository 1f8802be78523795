// Tile sizes of the wgmma family's backward, chosen from the head dim.
#pragma once
#include "core/target.h"
#include "sm90/config.cuh"

namespace flashvar::sm90 {

// What a copy of the kernel is made for.
enum class BwdPurpose {
  kDense,     // one length for all sequences
  kRagged,    // lengths that the device alone knows; the others serve them too
  kFeatures,  // ScoreFeatures but for a bias
  kKeys,      // without dQ, which then has a kernel of its own (attention_bwd_queries.cuh)
  kKeysFeatures,
};

// How two consumer warpgroups share a block's work.
enum class Sharing {
  kKeys,      // each owns 64 keys, with dK and dV of theirs
  kProducts,  // of the same 64 keys, the first computes S and dV, the second dP and dK; never dQ
};

struct AttentionBwdTile {
  int max_head_dim;  // serves head dims up to this, of queries and of values
  Sharing sharing;
  int block_q;  // queries of one step of the loop
  int stages;   // buffers of Q, and of dO
  int scores;   // buffers of dS, or of P
};

// clang-format off
inline constexpr AttentionBwdTile kAttentionBwdTiles[] = {
    { 64, Sharing::kKeys,     128, 3, 2},
    {128, Sharing::kKeys,      64, 2, 3},
    {192, Sharing::kProducts,  64, 3, 2},
    {256, Sharing::kProducts,  64, 2, 2},
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
  static constexpr bool kFeatures =
      kPurpose == BwdPurpose::kFeatures || kPurpose == BwdPurpose::kKeysFeatures;
  static constexpr AttentionBwdTile kTile =
      attention_bwd_tile(kHeadDim_ > kHeadDimV_ ? kHeadDim_ : kHeadDimV_);
  static constexpr bool kSharesKeys = kTile.sharing == Sharing::kKeys;
  static constexpr bool kGradQ =
      kSharesKeys && kPurpose != BwdPurpose::kKeys && kPurpose != BwdPurpose::kKeysFeatures;
  // Nothing is in flight between steps.
  static constexpr bool kSerial = kSharesKeys && (kFeatures || !kGradQ);
  static constexpr int kHeadDim = product_dim(kHeadDim_);
  static constexpr int kHeadDimV = product_dim(kHeadDimV_);
  static constexpr int kPages = (kHeadDim + kPageCols - 1) / kPageCols;
  static constexpr int kPagesV = (kHeadDimV + kPageCols - 1) / kPageCols;
  static constexpr int kBlockQ = kTile.block_q;
  static constexpr int kBlockKV = kSharesKeys ? 128 : 64;
  static constexpr int kScoreColumns = kBlockQ;
  static constexpr int kConsumers = 2;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // Of kGradQ: a warpgroup computes 64 rows of dQ: half of them, or half of their columns.
  static constexpr bool kSplitsRows = kBlockQ == 128;
  static constexpr int kGradQCols = kSplitsRows ? kHeadDim : kTile.max_head_dim / 2;
  static constexpr int kGradQElements = 64 * kGradQCols;  // of a warpgroup
  static constexpr int kTileElements = 2 * kGradQElements;
  static_assert(kBlockQ == 128 || kBlockQ == 64, "two warpgroups share dQ");

  static constexpr int kPageBytesQ = kBlockQ * 128;
  static constexpr int kPageBytesKV = kBlockKV * 128;
  static constexpr int kBytesQ = kPages * kPageBytesQ;
  static constexpr int kBytesGradOut = kPagesV * kPageBytesQ;
  // dQ's columns too.
  static constexpr int kPagesK = kGradQ && !kSplitsRows ? kTile.max_head_dim / kPageCols : kPages;
  static constexpr int kBytesK = kPagesK * kPageBytesKV;
  static constexpr int kBytesV = kPagesV * kPageBytesKV;
  static constexpr int kRowBytes = kBlockQ * 4;  // of LSE and of D
  // dS, P in fp32, or nothing.
  static constexpr int kBytesScores = kBlockQ * kBlockKV * (!kSharesKeys ? 4 : kGradQ ? 2 : 0);
  static constexpr int kScoreStages = kTile.scores;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kSharedMemory = kBarrierBytes + kBytesK + kBytesV +
                                       kStages * (kBytesQ + kBytesGradOut) +
                                       kScoreStages * kBytesScores + 2 * kStages * kRowBytes;
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit a block");
};

// dQ by itself.
struct AttentionBwdQueriesTile {
  int max_head_dim;
  int block_kv;
  int stages;    // buffers of K
  int stages_v;  // buffers of V
};

// clang-format off
inline constexpr AttentionBwdQueriesTile kAttentionBwdQueriesTiles[] = {
    { 64, 128, 2, 2},
    {128, 128, 2, 2},
    {192,  64, 2, 2},
    {256,  64, 2, 1},
};
// clang-format on

constexpr AttentionBwdQueriesTile attention_bwd_queries_tile(int head_dim) {
  for (const AttentionBwdQueriesTile& tile : kAttentionBwdQueriesTiles) {
    if (head_dim <= tile.max_head_dim) return tile;
  }
  return {};
}

template <class Target, class Dtype_, int kHeadDim_, int kHeadDimV_, bool kFeatures_>
struct AttentionBwdQueriesConfig {
  using Dtype = Dtype_;
  static constexpr bool kFeatures = kFeatures_;
  static constexpr int kLargest = kHeadDim_ > kHeadDimV_ ? kHeadDim_ : kHeadDimV_;
  static constexpr AttentionBwdQueriesTile kTile = attention_bwd_queries_tile(kLargest);
  static constexpr int kHeadDim = product_dim(kHeadDim_);
  static constexpr int kHeadDimV = product_dim(kHeadDimV_);
  static constexpr int kPages = (kHeadDim + kPageCols - 1) / kPageCols;
  static constexpr int kPagesV = (kHeadDimV + kPageCols - 1) / kPageCols;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockQ = 64 * kConsumers;
  static constexpr int kBlockKV = kTile.block_kv;
  static constexpr int kScoreColumns = kBlockKV;
  static constexpr int kStages = kTile.stages;
  static constexpr int kStagesV = kTile.stages_v;
  static constexpr int kBlocksAhead = 512 / kBlockKV;                        // as of the forward
  static constexpr int kRowsPerTile = attention_bwd_tile(kLargest).block_q;  // of LSE and D
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kPageBytesQ = kBlockQ * 128;
  static constexpr int kPageBytesKV = kBlockKV * 128;
  static constexpr int kGradOutAt = kPages * kPageBytesQ;  // behind Q
  static constexpr int kBytesQ = kGradOutAt + kPagesV * kPageBytesQ;
  static constexpr int kBytesK = kPages * kPageBytesKV;
  static constexpr int kBytesV = kPagesV * kPageBytesKV;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kSharedMemory =
      kBarrierBytes + kBytesQ + kStages * kBytesK + kStagesV * kBytesV;
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit a block");
  static_assert(kStagesV <= kStages, "barriers are numbered by K's buffers");
};

}  // namespace flashvar::sm90
