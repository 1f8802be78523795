// Tile sizes of the wgmma family, chosen from the head dims and from what a call wants.
#pragma once
#include "core/target.h"

namespace flashvar::sm90 {

// What a copy of the kernel is made for.
enum class Purpose {
  kPlain,
  kShort,     // sequences that AttentionFwdLaunch calls short: smaller tiles waste less
  kFeatures,  // ScoreFeatures: fewer scores at a time leave registers for what becomes of them
};

struct AttentionFwdTile {
  Purpose purpose;  // the most particular; a row of kPlain serves every one
  int max_head_dim;
  int max_head_dim_v;
  int block_kv;   // keys and values of one step of the loop
  int consumers;  // warpgroups, each owns 64 query rows
};

// The first row that serves is taken. Measured on an H200 (docs/hopper-ledger.md).
// clang-format off
inline constexpr AttentionFwdTile kAttentionFwdTiles[] = {
    {Purpose::kFeatures, 256, 256,  64, 2},
    {Purpose::kShort,     64,  64, 128, 2},
    {Purpose::kShort,    128, 128, 128, 2},
    {Purpose::kPlain,     64,  64, 128, 3},
    {Purpose::kPlain,    128, 128, 176, 2},
    {Purpose::kPlain,    192, 128, 128, 2},
    {Purpose::kPlain,    192, 192,  96, 2},
    {Purpose::kPlain,    256, 256,  80, 2},
};
// clang-format on

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
  static constexpr int kHeadDimV = (kHeadDimV_ + 31) / 32 * 32;  // what store_output takes at once
  static constexpr int kBlockQ = 64 * kTile.consumers;
  static constexpr int kBlockKV = kTile.block_kv;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr int kStages = 2;  // buffers of K, and of V
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // What setmaxnreg deals out of an SM's 65,536 registers.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

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
