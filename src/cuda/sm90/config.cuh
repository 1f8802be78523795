// Tile sizes of the wgmma family, chosen from the head dims and from what a call wants.
#pragma once
#include "core/target.h"

namespace flashvar::sm90 {

// What a copy of the kernel is made for.
enum class Purpose {
  kPlain,
  kShort,     // few keys, or such a mask, that another tile wastes less
  kFeatures,  // ScoreFeatures: fewer scores at a time, and more warps, as evaluating them takes
              // long
};

struct AttentionFwdTile {
  Purpose purpose;  // the most particular; a row of kPlain serves every one
  int max_head_dim;
  int max_head_dim_v;
  int block_kv;         // keys and values of one step of the loop
  int consumers;        // warpgroups, each owns 64 query rows
  int few_keys = 0;     // kShort: for calls with no more keys than this, or a window on the left,
  bool causal = false;  // and for all that hide later keys
};

// The first row that serves is taken. Measured on an H200 (docs/hopper-ledger.md).
// clang-format off
inline constexpr AttentionFwdTile kAttentionFwdTiles[] = {
    {Purpose::kFeatures,  64,  64,  64, 4},
    {Purpose::kFeatures, 128, 128,  64, 3},
    {Purpose::kFeatures, 256, 256,  64, 2},
    {Purpose::kShort,     64,  64,  64, 4, 4096, true},
    {Purpose::kShort,    112, 112, 128, 2, 2048},
    {Purpose::kShort,    128, 128, 128, 2, 2048, true},
    {Purpose::kPlain,     64,  64, 128, 3},
    {Purpose::kPlain,     96,  96, 112, 3},
    {Purpose::kPlain,    128, 128,  80, 3},
    {Purpose::kPlain,    192, 128, 128, 2},
    {Purpose::kPlain,    192, 192,  96, 2},
    {Purpose::kPlain,    256, 256,  80, 2},
};
// clang-format on

// Columns of V that products with ptx::Wgmma take, and that hold a head dim of values.
constexpr int columns_of_v(int head_dim_v) {
  int const step = head_dim_v <= 64 || head_dim_v > 128 ? 32 : 16;
  int const columns = (head_dim_v + step - 1) / step * step;
  return columns <= 192 ? columns : 256;
}

inline constexpr int kPageCols = 64;  // 128 bytes: one row of a swizzled page

constexpr AttentionFwdTile attention_fwd_tile(Purpose purpose, int head_dim, int head_dim_v) {
  for (const AttentionFwdTile& tile : kAttentionFwdTiles) {
    bool const suits = tile.purpose == Purpose::kPlain || tile.purpose == purpose;
    if (suits && head_dim <= tile.max_head_dim && head_dim_v <= tile.max_head_dim_v) return tile;
  }
  return {};
}

template <class Target, class Dtype_, int kHeadDim_, int kHeadDimV_, Purpose kPurpose>
struct AttentionFwdConfig {
  using Dtype = Dtype_;
  static constexpr AttentionFwdTile kTile = attention_fwd_tile(kPurpose, kHeadDim_, kHeadDimV_);
  static constexpr bool kFeatures = kPurpose == Purpose::kFeatures;
  static constexpr int kHeadDim = (kHeadDim_ + 15) / 16 * 16;
  static constexpr int kHeadDimV = columns_of_v(kHeadDimV_);
  static constexpr int kBlockQ = 64 * kTile.consumers;
  static constexpr int kBlockKV = kTile.block_kv;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr int kStages = 2;  // buffers of K, and of V
  // Blocks that are still to be copied when the next tile is looked for: a few microseconds' work.
  static constexpr int kBlocksAhead = 512 / kBlockKV;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // What setmaxnreg deals out of the registers that a block enters with.
  static constexpr int kProducerRegisters = kConsumers >= 3 ? 32 : 24;
  static constexpr int kEntryRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kConsumerRegisters =
      (kEntryRegisters * (1 + kConsumers) - kProducerRegisters) / kConsumers / 8 * 8;
  // Weights are taken before the block's maximum is known (LazySoftmax); not from scores that were
  // modified, which could not be computed again.
  static constexpr bool kLazy = !kFeatures;
  // O += P V is complete before the softmax, which then packs the weights too.
  static constexpr bool kEarlyWait = kLazy && kHeadDim <= 64;
  // Consumers take turns at the matrix units.
  static constexpr bool kTurns = kHeadDim > 128;
  // The warpgroup's number in uniform registers. Above, it costs registers that are not there.
  static constexpr bool kUniform = kHeadDim <= 192;

  static constexpr int kPages = (kHeadDim + kPageCols - 1) / kPageCols;
  static constexpr int kPagesV = (kHeadDimV + kPageCols - 1) / kPageCols;
  static constexpr int kPageBytesQ = kBlockQ * 128;
  static constexpr int kPageBytesKV = kBlockKV * 128;
  static constexpr int kBytesQ = kPages * kPageBytesQ;
  static constexpr int kBytesK = kPages * kPageBytesKV;
  static constexpr int kBytesV = kPagesV * kPageBytesKV;
  static constexpr int kBarrierBytes = 1024;
  static constexpr int kSharedMemory = kBarrierBytes + kBytesQ + kStages * (kBytesK + kBytesV);
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit a block");
};

}  // namespace flashvar::sm90
