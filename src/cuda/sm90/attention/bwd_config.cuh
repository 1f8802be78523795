// Tile sizes of the backward, chosen by the head dims and the kernel variant.
#pragma once
#include "core/ceil_div.h"
#include "core/target.h"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::attention {

// Variants of the dK and dV kernel: sums of these bits, which bwd_variants.h combines. All but
// kDense have a dynamic schedule, and also take varlen.
struct BwdVariant {
  static constexpr unsigned kDense = 0;        // all sequences have one length
  static constexpr unsigned kVarlen = 1;       // varlen, short windows, divided query blocks
  static constexpr unsigned kModifiers = 2;    // evaluates ScoreModifiers except the bias
  static constexpr unsigned kBias = 4;         // evaluates all ScoreModifiers of a call with a bias
  static constexpr unsigned kNoDq = 8;         // does not compute dQ; bwd_dq.cuh then does
  static constexpr unsigned kSmall = 16;       // small tiles, for short sequences
  static constexpr unsigned kOneKeyTile = 32;  // stores dQ of sequences of one key tile
};

// How the consumer warpgroups of a CTA split the work of a key tile.
enum class WorkSplit {
  kKeys,   // each owns 64 keys and their dK and dV
  kGemms,  // both own the same 64 keys: one computes S and dV, the other dP and dK; none dQ
};

struct BwdTile {
  int max_head_dim;  // largest head dim of q and k and of v
  WorkSplit split;
  int block_q;          // queries of one main-loop step
  int stages;           // buffers of Q, and of dO
  int exchange_stages;  // buffers in which consumers exchange dS (kGemms: P)
  // As stages and exchange_stages, with a bias in shared memory.
  int bias_stages;
  int bias_exchange_stages;
};

// The first row whose max_head_dim suffices is used. Measured on an H200 (docs/hopper-ledger.md).
// clang-format off
inline constexpr BwdTile kBwdTiles[] = {
    // max_head_dim, split, block_q, stages, exchange_stages, bias_stages, bias_exchange_stages
    { 64, WorkSplit::kKeys,  128, 3, 2, 2, 2},
    {128, WorkSplit::kKeys,   64, 2, 3, 2, 3},
    {192, WorkSplit::kGemms,  64, 3, 2, 2, 2},
    {256, WorkSplit::kGemms,  64, 2, 2, 2, 1},
};
// clang-format on

// Small tiles: one consumer, and two CTAs on an SM.
// clang-format off
inline constexpr BwdTile kSmallBwdTiles[] = {
    // columns as above
    { 64, WorkSplit::kKeys, 64, 2, 2, 2, 2},
    {128, WorkSplit::kKeys, 64, 1, 2, 1, 2},
};
// clang-format on

constexpr BwdTile bwd_tile(int head_dim) {
  for (const BwdTile& tile : kBwdTiles) {
    if (head_dim <= tile.max_head_dim) return tile;
  }
  return {};
}

constexpr BwdTile small_bwd_tile(int head_dim) {
  for (const BwdTile& tile : kSmallBwdTiles) {
    if (head_dim <= tile.max_head_dim) return tile;
  }
  return {};
}

// Columns that the GEMMs compute: the head dim rounded up to half a column block (32) up to 64, to
// a quarter (16) up to 128, and to whole column blocks above, where accumulators are large. Columns
// beyond the head dim are zeros.
constexpr int bwd_padded_head_dim(int head_dim) {
  int const step = head_dim <= kColBlockCols       ? kColBlockCols / 2
                   : head_dim <= 2 * kColBlockCols ? kColBlockCols / 4
                                                   : kColBlockCols;
  return ceil_div(head_dim, step) * step;
}

template <class Target, class Dtype_, int kHeadDim_, int kHeadDimV_, unsigned kVariant_>
struct BwdConfig {
  using Dtype = Dtype_;
  static constexpr unsigned kVariant = kVariant_;
  static constexpr bool has(unsigned bits) { return (kVariant & bits) != 0; }
  // Takes tiles from a counter (bwd_dynamic.cuh), and supports varlen.
  static constexpr bool kDynamic = kVariant != BwdVariant::kDense;
  static constexpr bool kSmall = has(BwdVariant::kSmall);
  static constexpr bool kBias = has(BwdVariant::kBias);
  static constexpr bool kModifiers = kBias || has(BwdVariant::kModifiers);
  static constexpr int kLargest = kHeadDim_ > kHeadDimV_ ? kHeadDim_ : kHeadDimV_;
  static constexpr BwdTile kTile = kSmall ? small_bwd_tile(kLargest) : bwd_tile(kLargest);
  static constexpr bool kSplitsKeys = kTile.split == WorkSplit::kKeys;
  static constexpr bool kGradBias = kBias && kSplitsKeys;  // the gradient too, if wanted
  static constexpr bool kGradQ = kSplitsKeys && !has(BwdVariant::kNoDq);
  // Whether dQ may be added to sums, and whether it may be stored (bwd_grad_q.cuh). kDense and
  // kVarlen do not store, because code that is skipped in the loop makes it slower, nor kModifiers
  // above 64, for want of registers.
  static constexpr bool kAddsGradQ = kGradQ && !has(BwdVariant::kOneKeyTile);
  static constexpr bool kStoresGradQ =
      kGradQ && (!kAddsGradQ || kSmall || kBias || (kModifiers && kLargest <= 64));
  // mma tiles whose LSE a pipelined step loads before the wait for S, and delta before that for dP.
  static constexpr int kEarlyTiles = kLargest <= 64 ? 4 : 8;
  // Steps without software pipelining: no wgmma is in flight between them.
  static constexpr bool kSerial = kSplitsKeys && (kModifiers || !kGradQ);
  static constexpr int kHeadDim = bwd_padded_head_dim(kHeadDim_);
  static constexpr int kHeadDimV = bwd_padded_head_dim(kHeadDimV_);
  static constexpr int kColBlocks = ceil_div(kHeadDim, kColBlockCols);
  static constexpr int kColBlocksV = ceil_div(kHeadDimV, kColBlockCols);
  static constexpr int kBlockQ = kTile.block_q;
  static constexpr int kConsumers = kSmall ? 1 : 2;
  static constexpr int kBlocksPerSM = kSmall ? 2 : 1;
  static constexpr int kBlockKV = kSplitsKeys ? 64 * kConsumers : 64;
  static constexpr int kScoreColumns = kBlockQ;
  static constexpr int kStages = kBias ? kTile.bias_stages : kTile.stages;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // setmaxnreg split, in registers per thread: 24 + 2 * 240 = 3 * 168, those at kernel entry.
  // Small: 24 + 232 = 2 * 128.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = kSmall ? 232 : 240;

  // kGradQ: each warpgroup computes 64 x kGradQCols of dQ: 64 of its rows, or half of its columns.
  // The fp32 sums have whole groups of 32 columns.
  static constexpr bool kSplitsRows = kBlockQ == 64 * kConsumers;
  static constexpr int kGradQCols =
      kSplitsRows ? ceil_div(kHeadDim, 32) * 32 : kTile.max_head_dim / 2;
  static constexpr int kGradQElements = 64 * kGradQCols;  // of one warpgroup
  static constexpr int kTileElements = kConsumers * kGradQElements;
  static_assert(kSplitsRows || (kBlockQ == 64 && kConsumers == 2), "the warpgroups share dQ");

  static constexpr int kColBlockBytesQ = kBlockQ * 128;
  static constexpr int kColBlockBytesKV = kBlockKV * 128;
  static constexpr int kBytesQ = kColBlocks * kColBlockBytesQ;
  static constexpr int kBytesGradOut = kColBlocksV * kColBlockBytesQ;
  // Column blocks of K: as many as dQ's accumulators have, because dQ = dS K reads them all. Those
  // beyond the head dim are zeros.
  static constexpr int kColBlocksK =
      kGradQ && !kSplitsRows ? kTile.max_head_dim / kColBlockCols : kColBlocks;
  static constexpr int kBytesK = kColBlocksK * kColBlockBytesKV;
  static constexpr int kBytesV = kColBlocksV * kColBlockBytesKV;
  static constexpr int kRowBytes = kBlockQ * 4;  // bytes of a stage of LSE, and of delta
  // A buffer of dS in 16 bits (kGemms: of P in fp32); none without dQ.
  static constexpr int kBytesExchange = kBlockQ * kBlockKV * (!kSplitsKeys ? 4 : kGradQ ? 2 : 0);
  static constexpr int kExchangeStages = kBias ? kTile.bias_exchange_stages : kTile.exchange_stages;
  static_assert(!kSmall || kExchangeStages == 2, "bwd_small_step() relies on it");
  static constexpr int kBarrierBytes = 1024;  // mbarriers and work tiles (smem.cuh)
  // Queries, keys and bytes (for fp32) of a BiasStage; one for each warp that computes S.
  static constexpr int kBiasQueries = kBlockQ, kBiasKeys = 16;
  static constexpr int kBiasWarps = kSplitsKeys ? 4 * kConsumers : 4;
  static constexpr int kBytesBias = kBias ? kBiasQueries * kBiasKeys * 4 : 0;
  static constexpr int kBiasOffset = kBarrierBytes + kBytesK + kBytesV +
                                     kStages * (kBytesQ + kBytesGradOut) +
                                     kExchangeStages * kBytesExchange + 2 * kStages * kRowBytes;
  static constexpr int kSharedMemory = kBiasOffset + kBiasWarps * kBytesBias;
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit a block");
  static_assert(kBlocksPerSM <= Target::blocks_that_fit(kSharedMemory),
                "the blocks must fit an SM");
};

// Tile sizes of the dQ kernel.
struct BwdDqTile {
  int max_head_dim;   // largest head dim of q and k and of v
  int block_kv;       // keys of one main-loop step
  int stages;         // buffers of K
  int stages_v;       // buffers of V
  int bias_block_kv;  // as block_kv, where a bias takes shared memory
};

// clang-format off
inline constexpr BwdDqTile kBwdDqTiles[] = {
    // max_head_dim, block_kv, stages, stages_v, bias_block_kv
    { 64, 128, 2, 2, 128},
    {128, 128, 2, 2,  64},
    {192,  64, 2, 2,  64},
    {256,  64, 2, 1,  32},
};
// clang-format on

constexpr BwdDqTile bwd_dq_tile(int head_dim) {
  for (const BwdDqTile& tile : kBwdDqTiles) {
    if (head_dim <= tile.max_head_dim) return tile;
  }
  return {};
}

// kModifiers_, kBias_: as BwdConfig::kModifiers and kBias.
template <class Target, class Dtype_, int kHeadDim_, int kHeadDimV_, bool kModifiers_, bool kBias_>
struct BwdDqConfig {
  using Dtype = Dtype_;
  static constexpr bool kModifiers = kModifiers_;
  static constexpr bool kBias = kBias_;
  static constexpr bool kGradBias = false;  // the dK and dV kernel computes it
  static constexpr bool kSplits = false;
  static constexpr int kLargest = kHeadDim_ > kHeadDimV_ ? kHeadDim_ : kHeadDimV_;
  static constexpr BwdDqTile kTile = bwd_dq_tile(kLargest);
  static constexpr int kHeadDim = bwd_padded_head_dim(kHeadDim_);
  static constexpr int kHeadDimV = bwd_padded_head_dim(kHeadDimV_);
  static constexpr int kColBlocks = ceil_div(kHeadDim, kColBlockCols);
  static constexpr int kColBlocksV = ceil_div(kHeadDimV, kColBlockCols);
  static constexpr int kConsumers = 2;
  static constexpr int kBlockQ = 64 * kConsumers;
  static constexpr int kBlockKV = kBias ? kTile.bias_block_kv : kTile.block_kv;
  static constexpr int kScoreColumns = kBlockKV;
  static constexpr int kStages = kTile.stages;
  static constexpr int kStagesV = kTile.stages_v;
  static constexpr int kBlocksAhead = 512 / kBlockKV;               // as in FwdConfig
  static constexpr int kPaddedBlockQ = bwd_tile(kLargest).block_q;  // query tile of LSE and delta
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // setmaxnreg split: 40 + 2 * 232 = 3 * 168.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kColBlockBytesQ = kBlockQ * 128;
  static constexpr int kColBlockBytesKV = kBlockKV * 128;
  static constexpr int kGradOutOffset = kColBlocks * kColBlockBytesQ;  // dO lies after Q
  static constexpr int kBytesQ = kGradOutOffset + kColBlocksV * kColBlockBytesQ;
  static constexpr int kBytesK = kColBlocks * kColBlockBytesKV;
  static constexpr int kBytesV = kColBlocksV * kColBlockBytesKV;
  static constexpr int kBarrierBytes = 1024;  // mbarriers and work tile (smem.cuh)
  // Queries, keys and bytes (for fp32) of a warp's BiasStage.
  static constexpr int kBiasQueries = 16, kBiasKeys = kBlockKV;
  static constexpr int kBytesBias = kBias ? kBiasQueries * kBiasKeys * 4 : 0;
  static constexpr int kBiasOffset =
      kBarrierBytes + kBytesQ + kStages * kBytesK + kStagesV * kBytesV;
  static constexpr int kSharedMemory = kBiasOffset + 4 * kConsumers * kBytesBias;
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit a block");
  static_assert(kStagesV <= kStages, "mbarriers are numbered by K's stages");
};

}  // namespace flashvar::sm90::attention
