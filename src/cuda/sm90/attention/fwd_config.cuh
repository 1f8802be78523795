// Tile sizes of the forward, chosen by the head dims and the kernel variant.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "core/target.h"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::attention {

// Variants of the kernel, each with tiles of its own.
enum class FwdVariant {
  kGeneral,
  kMedium,      // a left window, or sizes for which larger tiles waste more work (fwd_variants.h)
  kSmall,       // few steps per tile: several blocks share an SM, so that their latencies overlap
  kSplit,       // split-KV and PackGQA (KeySplits), and few queries on many keys; no modifiers
  kSmallSplit,  // split-KV and PackGQA, in small tiles
  kModifiers,   // evaluates ScoreModifiers: fewer scores and more warps per tile hide their latency
  kSmallModifiers,  // likewise, in small tiles
  kLines,           // small tiles whose rows are moved to lines of memory (LineShift): few queries
  kSmallWide,       // small tiles with steps of 80 keys, of which 77 or 257 keys take fewer
};

struct FwdTile {
  FwdVariant variant;  // rows of kGeneral also serve the other variants
  int max_head_dim;    // of q and k
  int max_head_dim_v;
  int block_kv;           // keys of one main-loop step
  int consumers;          // warpgroups of 64 query rows each
  int blocks_per_sm = 1;  // CTAs that the register limit is set for (kOneCtaPerSM: one runs)
  // For estimates of time (fwd_variants.h). A cost is the time per score in percent, relative to
  // other variants of the head dims.
  int cost = 100;         // where tiles fill all SMs
  int start = 20;         // a tile's first loads and its results, in tenths of a step of the loop
  int cost_causal = 0;    // under a causal mask, where it differs
  int cost_alone = 0;     // lower bound, for a CTA that is alone on an SM on which several fit
  int cost_one_tile = 0;  // likewise, if one small tile has all queries: keys come from memory
};

// The first row whose variant and head dims fit is used. Measured on an H200
// (docs/hopper-ledger.md).
// clang-format off
inline constexpr FwdTile kFwdTiles[] = {
    // variant, max head dims, block_kv, consumers, blocks_per_sm; cost, start, and costs: causal,
    // alone, one tile
    {FwdVariant::kModifiers,       64,  64,  64, 4},
    {FwdVariant::kModifiers,      128, 128,  64, 3},
    {FwdVariant::kModifiers,      256, 256,  64, 2},
    {FwdVariant::kSmallModifiers,  64,  64,  64, 1, 3, 120, 20,   0, 200, 340},
    {FwdVariant::kSmallModifiers, 128, 128,  64, 1, 2, 128, 20,   0, 140, 255},
    {FwdVariant::kSplit,           64,  64, 128, 2, 1, 125},
    {FwdVariant::kSplit,          128, 128, 128, 2},
    {FwdVariant::kSmallSplit,      64,  64, 128, 1, 2, 250},
    {FwdVariant::kSmallSplit,     128, 128,  64, 1, 2, 230},
    {FwdVariant::kLines,          128, 128,  64, 1, 2},
    {FwdVariant::kSmall,           64,  64,  64, 1, 3, 119, 22,   0, 175, 300},
    {FwdVariant::kSmall,           96,  96,  64, 1, 2, 133, 24,   0, 148, 285},
    {FwdVariant::kSmall,          128, 128,  64, 1, 2, 123, 20,   0, 130, 245},
    {FwdVariant::kSmallWide,       64,  64,  80, 1, 3, 122, 22,   0, 178},
    {FwdVariant::kSmallWide,       96,  96,  80, 1, 2, 127, 22,   0, 153},
    {FwdVariant::kSmallWide,      128, 128,  80, 1, 2, 125, 19,   0, 125},
    {FwdVariant::kMedium,          64,  64,  64, 4, 1, 111, 30, 107},
    {FwdVariant::kMedium,          96,  96, 128, 2, 1, 105},
    {FwdVariant::kMedium,         128, 128, 128, 2},
    {FwdVariant::kGeneral,         64,  64, 128, 3, 1,  94, 30, 107},
    {FwdVariant::kGeneral,         96,  96, 112, 3, 1,  95, 30},
    {FwdVariant::kGeneral,        128, 128,  80, 3, 1,  92, 30},
    {FwdVariant::kGeneral,        192, 128, 128, 2},
    {FwdVariant::kGeneral,        192, 192,  96, 2},
    {FwdVariant::kGeneral,        256, 256,  80, 2},
};
// clang-format on

// Columns of V that the GEMMs compute: the smallest N of ptx::Wgmma that holds V's head dim.
constexpr int fwd_padded_head_dim_v(int head_dim_v) {
  int const step = head_dim_v <= 64 || head_dim_v > 128 ? 32 : 16;
  int const columns = ceil_div(head_dim_v, step) * step;
  return columns <= 192 ? columns : 256;
}

constexpr FwdTile fwd_tile(FwdVariant variant, int head_dim, int head_dim_v) {
  for (const FwdTile& tile : kFwdTiles) {
    bool const fits = tile.variant == FwdVariant::kGeneral || tile.variant == variant;
    if (fits && head_dim <= tile.max_head_dim && head_dim_v <= tile.max_head_dim_v) return tile;
  }
  return {};
}

template <class Target, class Dtype_, int kHeadDim_, int kHeadDimV_, FwdVariant kVariant>
struct FwdConfig {
  using Dtype = Dtype_;
  static constexpr FwdTile kTile = fwd_tile(kVariant, kHeadDim_, kHeadDimV_);
  static constexpr bool kModifiers =
      kVariant == FwdVariant::kModifiers || kVariant == FwdVariant::kSmallModifiers;
  static constexpr bool kSplits =
      kVariant == FwdVariant::kSplit || kVariant == FwdVariant::kSmallSplit;
  // One CTA runs on an SM, because it takes more than half of the shared memory: two would load no
  // faster, and could start on one SM while others are idle. Registers have room for two, so that
  // blocks of fwd_merge_kernel start beside it.
  static constexpr bool kOneCtaPerSM =
      kVariant == FwdVariant::kSmallSplit || kVariant == FwdVariant::kLines;
  // LineShift moves the rows of K and of V, so the GEMMs compute all columns of two column blocks:
  // up to 60 % more work, which matters little where loads limit.
  static constexpr bool kShiftsK = kVariant == FwdVariant::kLines && kHeadDim_ > 64;
  static constexpr bool kShiftsV = kVariant == FwdVariant::kLines && kHeadDimV_ > 64;
  // With kSplits: whether the kernel also stores the results of one split itself. Up to head dim 64
  // no other variant has tiles of 128 queries.
  static constexpr bool kStoresWhole = kVariant == FwdVariant::kSplit && kTile.max_head_dim <= 64;
  static constexpr int kHeadDim = kShiftsK ? 128 : ceil_div(kHeadDim_, 16) * 16;
  static constexpr int kHeadDimV = kShiftsV ? 128 : fwd_padded_head_dim_v(kHeadDimV_);
  static constexpr int kBlockQ = 64 * kTile.consumers;
  static constexpr int kBlockKV = kTile.block_kv;
  static constexpr int kConsumers = kTile.consumers;
  // Buffers of K, and of V. A third one is worth 1 to 2 % where loads limit, and costs as much with
  // larger tiles.
  static constexpr int kStages = kOneCtaPerSM ? 3 : 2;
  // Key blocks still to be loaded when the load warp releases its work tile, so that the scheduler
  // prepares the next: 512 keys ahead, a few microseconds (docs/hopper-ledger.md, forward, version
  // 26).
  static constexpr int kBlocksAhead = 512 / kBlockKV;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kMinBlocksPerSM = kTile.blocks_per_sm;
  static constexpr int kBlocksPerSM = kOneCtaPerSM ? 1 : kMinBlocksPerSM;
  // setmaxnreg split, in registers per thread: the producer's, the number that all threads have at
  // kernel entry (an SM has 65536), and what the producer leaves to each consumer. setmaxnreg takes
  // multiples of 8. With kSplits the load warp needs more: it looks up the rows of varlen queries
  // (KeySplits).
  static constexpr int kProducerRegisters = kConsumers >= 3 || kSplits ? 32 : 24;
  static constexpr int kEntryRegisters = 65536 / (kThreads * kMinBlocksPerSM) / 8 * 8;
  static constexpr int kConsumerRegisters =
      (kEntryRegisters * (1 + kConsumers) - kProducerRegisters) / kConsumers / 8 * 8;
  // P is computed before the block's maximum is known (LazySoftmax). Not with modifiers, which
  // FwdConsumer::lazy_softmax_step() does not evaluate.
  static constexpr bool kLazy = !kModifiers;
  // A consumer waits for O += P V before the softmax, which then packs P too.
  static constexpr bool kEarlyWait = kLazy && kHeadDim <= 64;
  // Consumers issue their GEMMs in a fixed order (ping-pong scheduling with ordering barriers).
  static constexpr bool kOrdered = kHeadDim > 128;
  // The warpgroup's index is kept in a uniform register; at larger head dims that costs a spill.
  static constexpr bool kUniform = kHeadDim <= 192;

  static constexpr int kColBlocks = ceil_div(kHeadDim, kColBlockCols);
  static constexpr int kColBlocksV = ceil_div(kHeadDimV, kColBlockCols);
  static constexpr int kColBlockBytesQ = kBlockQ * 128;
  static constexpr int kColBlockBytesKV = kBlockKV * 128;
  static constexpr int kBytesQ = kColBlocks * kColBlockBytesQ;
  static constexpr int kBytesK = kColBlocks * kColBlockBytesKV;
  static constexpr int kBytesV = kColBlocksV * kColBlockBytesKV;
  static constexpr int kBarrierBytes = 1024;  // mbarriers and work tile (smem.cuh)
  // Queries, keys and bytes (for fp32) of a warp's BiasStage.
  static constexpr int kBiasQueries = 16, kBiasKeys = kBlockKV;
  static constexpr int kBytesBias = kModifiers ? kBiasQueries * kBiasKeys * 4 : 0;
  static constexpr int kBiasOffset = kBarrierBytes + kBytesQ + kStages * (kBytesK + kBytesV);
  static constexpr int kUsedMemory = kBiasOffset + 4 * kConsumers * kBytesBias;
  // With kOneCtaPerSM more than half of what an SM has.
  static constexpr int kSharedMemory =
      kOneCtaPerSM ? std::max(kUsedMemory, Target::kSharedMemory / 2 + 1024) : kUsedMemory;
  static_assert(kBlocksPerSM <= Target::blocks_that_fit(kSharedMemory),
                "the blocks must fit an SM");
  static_assert(!kOneCtaPerSM || Target::blocks_that_fit(kSharedMemory) == 1,
                "a second block must not fit");
};

}  // namespace flashvar::sm90::attention
