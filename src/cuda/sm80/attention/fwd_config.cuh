// Tile sizes of the forward, chosen by the head dims and the target's shared memory.
#pragma once
#include "core/ceil_div.h"
#include "core/smem_layout.cuh"
#include "core/target.h"
#include "sm80/attention/query_tile.cuh"

namespace flashvar::sm80::attention {

struct FwdTile {
  int max_head_dim;                 // columns of V: the output accumulators must fit the registers
  int block_q;                      // query rows of a block
  int block_kv;                     // keys of one main-loop step
  int block_kv_reduced;             // the same of variants that need registers (kFewerKeys)
  int warps;                        // each owns block_q / warps rows
  int blocks_per_sm;                // co-resident blocks; one computes while another waits
  int architectures_before = 1000;  // 10 * major + minor; from there on ptxas spills
};

// In order of preference: the first row that the head dims, the shared memory and the architecture
// allow is taken.
// Rates of these tiles: docs/kernels/mma-sync.md.
// clang-format off
inline constexpr FwdTile kFwdTiles[] = {
    // max_head_dim, block_q, block_kv, block_kv_reduced, warps, blocks_per_sm, architectures_before
    { 32, 128,  64, 32, 4, 3},
    { 64, 128, 128, 64, 4, 2},
    { 96, 128,  96, 64, 4, 2, 100},
    { 96, 128,  64, 64, 4, 2},
    {128, 128,  64, 32, 4, 2},
    {128, 128,  32, 32, 4, 2},
    {192,  64,  96, 64, 4, 2},
    {192,  64,  64, 64, 4, 2},
    {192, 128,  64, 64, 8, 1},
    {256,  64,  64, 64, 4, 2},
    {256, 128,  96, 64, 8, 1},
    {256,  64,  64, 64, 4, 1},
};
// clang-format on

// Columns of a tile in shared memory and of the GEMMs: the head dim rounded up to whole column
// blocks of 32. Columns beyond the head dim are zeros.
constexpr int padded_head_dim(int head_dim) { return ceil_div(head_dim, 32) * 32; }

// Bytes per block.
constexpr int fwd_shared_memory(int head_dim, int head_dim_v, int block_q, int block_kv) {
  int const d = padded_head_dim(head_dim), dv = padded_head_dim(head_dim_v);
  return 2 * (block_q * d + block_kv * (d + dv)) + static_cast<int>(sizeof(SharedQueryTile));
}

// The first row of the table that fits.
template <class Target>
constexpr FwdTile fwd_tile(int head_dim, int head_dim_v) {
  for (const FwdTile& tile : kFwdTiles) {
    int const bytes = fwd_shared_memory(head_dim, head_dim_v, tile.block_q, tile.block_kv);
    if (head_dim_v <= tile.max_head_dim && Target::kArchitecture < tile.architectures_before &&
        tile.blocks_per_sm <= Target::blocks_that_fit(bytes)) {
      return tile;
    }
  }
  return {};
}

// Constants of one kernel. kModifiers: it evaluates ScoreModifiers. kSplits: it has split-KV and
// PackGQA of all calls (KeySplits).
template <class Target, class Dtype_, int kMaxHeadDim, int kMaxHeadDimV, bool kModifiers_,
          bool kSplits_ = false>
struct FwdConfig {
  using Dtype = Dtype_;
  static constexpr bool kModifiers = kModifiers_, kSplits = kSplits_;
  static constexpr FwdTile kTile = fwd_tile<Target>(kMaxHeadDim, kMaxHeadDimV);
  static_assert(kTile.warps > 0, "no tile of this head dim fits the target's shared memory");

  static constexpr int kHeadDim = padded_head_dim(kMaxHeadDim);
  static constexpr int kHeadDimV = padded_head_dim(kMaxHeadDimV);
  static constexpr int kBlockQ = kTile.block_q;
  // With modifiers, and with kSplits on 10.x and 11.0, ptxas would spill.
  static constexpr bool kFewerKeys =
      kModifiers || (kSplits && Target::kArchitecture >= 100 && Target::kArchitecture < 120);
  static constexpr int kBlockKV = kFewerKeys ? kTile.block_kv_reduced : kTile.block_kv;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = kTile.blocks_per_sm;
  static constexpr int kWarpRows = kBlockQ / kWarps;
  // Warps skip key blocks that none of their rows sees. Not with two or three blocks per SM, where
  // the other blocks keep the tensor cores busy, unless most warps may have no row. On 9.0, where
  // wgmma takes such calls, ptxas would spill.
  static constexpr bool kSkips = kBlocksPerSM == 1 || (kSplits && Target::kArchitecture != 90);
  static_assert(kWarpRows % 16 == 0, "a warp owns whole mma tiles");

  using SmemLayoutQ = SmemLayout<kBlockQ, kHeadDim>;
  using SmemLayoutK = SmemLayout<kBlockKV, kHeadDim>;
  using SmemLayoutV = SmemLayout<kBlockKV, kHeadDimV>;
  using SmemLayoutO = SmemLayout<kBlockQ, kHeadDimV>;
  static_assert(SmemLayoutO::kBytes <= SmemLayoutQ::kBytes + SmemLayoutK::kBytes,
                "O is written while V is read");
  static constexpr int kSharedMemory =
      fwd_shared_memory(kMaxHeadDim, kMaxHeadDimV, kBlockQ, kBlockKV);
};

}  // namespace flashvar::sm80::attention
