// Tile sizes of the backward, chosen by the head dims and the target's shared memory.
#pragma once
#include "core/smem_layout.cuh"
#include "core/target.h"
#include "sm80/attention/fwd_config.cuh"
#include "sm80/attention/key_tile.cuh"
#include "sm80/epilogue.cuh"

namespace flashvar::sm80::attention {

// A block owns block_kv keys and iterates over the queries in steps of block_q. Its warps are
// arranged in three grids: for the scores (keys x queries), for dK and dV (keys x columns) and for
// dQ (queries x columns). Where the first two grids are equal and one warp spans all queries, P and
// dS are operands in registers; otherwise they go through shared memory.
struct BwdTile {
  int max_head_dim;                 // of K and of V
  int block_q;                      // queries of one main-loop step
  int block_kv;                     // keys of a block
  int warps;                        // of a block
  int score_warps;                  // warps along the keys, for the scores
  int grad_kv_warps;                // warps along the keys, for dK and dV
  int grad_q_warps;                 // warps along the queries, for dQ
  int stages;                       // buffers of Q and dO
  int blocks_per_sm;                // co-resident blocks; one computes while another waits
  int architectures_before = 1000;  // 10 * major + minor; from there on ptxas spills
};

// In order of preference: the first row that the head dims, the shared memory and the architecture
// allow is taken.
// Rates of these tiles: docs/kernels/mma-sync.md.
// clang-format off
inline constexpr BwdTile kBwdTiles[] = {
    // max_head_dim, block_q, block_kv, warps, score_warps, grad_kv_warps, grad_q_warps, stages,
    // blocks_per_sm, architectures_before
    { 64, 32, 128, 4, 4, 4, 2, 2, 2},
    { 64, 32, 128, 4, 4, 4, 2, 1, 2, 120},
    { 96, 64,  64, 4, 2, 2, 2, 1, 2},
    { 96, 64,  64, 8, 4, 4, 4, 2, 1},
    {128, 64, 128, 8, 4, 4, 2, 2, 1},
    {128, 64,  64, 4, 2, 2, 2, 1, 2},
    {128, 64,  64, 8, 4, 2, 2, 1, 1},
    {192, 64,  96, 8, 2, 2, 2, 1, 1},
    {256, 64,  64, 8, 4, 2, 2, 1, 1},
    {256, 32,  32, 4, 2, 2, 2, 1, 1},
};
// clang-format on

// Bytes per block: K, V; `stages` buffers of Q, dO, LSE and delta; dS and, unless in registers, P;
// and the KeyTile.
constexpr int bwd_shared_memory(int head_dim, int head_dim_v, const BwdTile& tile) {
  int const columns = padded_head_dim(head_dim) + padded_head_dim(head_dim_v);
  bool const in_registers = tile.score_warps == tile.warps && tile.grad_kv_warps == tile.warps;
  int const scores = (in_registers ? 1 : 2) * tile.block_q * tile.block_kv;
  int const elements = (tile.block_kv + tile.stages * tile.block_q) * columns + scores;
  return 2 * elements + tile.stages * 2 * tile.block_q * static_cast<int>(sizeof(float)) +
         static_cast<int>(sizeof(KeyTile));
}

template <class Target>
constexpr BwdTile bwd_tile(int head_dim, int head_dim_v) {
  for (const BwdTile& tile : kBwdTiles) {
    int const bytes = bwd_shared_memory(head_dim, head_dim_v, tile);
    if (head_dim <= tile.max_head_dim && head_dim_v <= tile.max_head_dim &&
        Target::kArchitecture < tile.architectures_before &&
        tile.blocks_per_sm <= Target::blocks_that_fit(bytes)) {
      return tile;
    }
  }
  return {};
}

// Constants of one kernel. kModifiers: it evaluates ScoreModifiers, and also takes unaligned
// tensors.
template <class Target, class Dtype_, int kMaxHeadDim, int kMaxHeadDimV, bool kModifiers_>
struct BwdConfig {
  using Dtype = Dtype_;
  static constexpr bool kModifiers = kModifiers_;
  static constexpr BwdTile kTile = bwd_tile<Target>(kMaxHeadDim, kMaxHeadDimV);
  static_assert(kTile.warps > 0, "no tile of this head dim fits the target's shared memory");

  static constexpr int kHeadDim = padded_head_dim(kMaxHeadDim);
  static constexpr int kHeadDimV = padded_head_dim(kMaxHeadDimV);
  static constexpr int kBlockQ = kTile.block_q;
  static constexpr int kBlockKV = kTile.block_kv;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kTile.stages;
  static constexpr int kBlocksPerSM = kTile.blocks_per_sm;

  static constexpr int kScoreWarps = kTile.score_warps;
  static constexpr int kScoreKeys = kBlockKV / kScoreWarps;  // a warp's share of the scores
  static constexpr int kScoreQueries = kBlockQ / (kWarps / kScoreWarps);
  static constexpr int kGradKVWarps = kTile.grad_kv_warps;
  static constexpr int kGradKVRows = kBlockKV / kGradKVWarps;
  static constexpr int kGradKVColumnWarps = kWarps / kGradKVWarps;
  static constexpr int kGradQWarps = kTile.grad_q_warps;
  static constexpr int kGradQRows = kBlockQ / kGradQWarps;
  static constexpr int kGradQColumnWarps = kWarps / kGradQWarps;
  static constexpr bool kScoresInRegisters = kScoreWarps == kWarps && kGradKVWarps == kWarps;
  static_assert(kScoreKeys % 16 == 0 && kScoreQueries % 16 == 0 && kGradKVRows % 16 == 0 &&
                    kGradQRows % 16 == 0,
                "a warp owns whole mma tiles");
  static_assert(kHeadDim % (16 * kGradQColumnWarps) == 0 &&
                    kHeadDim % (16 * kGradKVColumnWarps) == 0 &&
                    kHeadDimV % (16 * kGradKVColumnWarps) == 0,
                "warps share the columns evenly");

  using SmemLayoutQ = SmemLayout<kBlockQ, kHeadDim>;
  using SmemLayoutDO = SmemLayout<kBlockQ, kHeadDimV>;
  using SmemLayoutK = SmemLayout<kBlockKV, kHeadDim>;
  using SmemLayoutV = SmemLayout<kBlockKV, kHeadDimV>;
  using SmemLayoutS = SmemLayout<kBlockKV, kBlockQ>;
  static constexpr int kStageBytes =
      SmemLayoutQ::kBytes + SmemLayoutDO::kBytes + 2 * kBlockQ * static_cast<int>(sizeof(float));
  static constexpr int kSharedMemory = bwd_shared_memory(kMaxHeadDim, kMaxHeadDimV, kTile);

  // How the warps hold the block's tiles of dQ, dK and dV.
  using GradQ = GradTile<kBlockQ, kHeadDim, kGradQWarps, kGradQColumnWarps>;
  using GradK = GradTile<kBlockKV, kHeadDim, kGradKVWarps, kGradKVColumnWarps>;
  using GradV = GradTile<kBlockKV, kHeadDimV, kGradKVWarps, kGradKVColumnWarps>;
};

}  // namespace flashvar::sm80::attention
