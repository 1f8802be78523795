// Tile sizes of the mma.sync family, chosen from the head dim and the shared memory a block may
// have.
#pragma once
#include "core/smem_layout.cuh"
#include "core/target.h"
#include "sm80/attention_fwd_block.cuh"

namespace flashvar::sm80 {

struct AttentionFwdTile {
  int max_head_dim;       // serves head dims of values up to this: registers hold the output
  int block_q;            // query rows of a block
  int block_kv;           // keys and values of one step of the loop
  int block_kv_features;  // fewer where features need the registers
  int warps;              // each owns block_q / warps rows
  int blocks_per_sm;      // that shared memory must leave room for, to hide each other's latencies
};

// In order of preference: the first row that serves the head dim and fits is taken.
// clang-format off
inline constexpr AttentionFwdTile kAttentionFwdTiles[] = {
    { 32, 128,  64, 32, 4, 3},
    { 64, 128, 128, 64, 4, 2},
    { 96, 128,  96, 64, 4, 2},
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

// The hardware keeps this much of an SM's shared memory for itself, per block.
inline constexpr int kReservedSharedMemory = 1024;

// Columns of a tile in shared memory: whole pages, the head dim's tail zero-filled.
constexpr int padded_head_dim(int head_dim) { return (head_dim + 31) / 32 * 32; }

constexpr int attention_fwd_shared_memory(int head_dim, int head_dim_v, int block_q, int block_kv) {
  int const d = padded_head_dim(head_dim), dv = padded_head_dim(head_dim_v);
  return 2 * (block_q * d + block_kv * (d + dv)) + static_cast<int>(sizeof(SharedBlock));
}

constexpr AttentionFwdTile attention_fwd_tile(int head_dim, int head_dim_v, int shared_memory) {
  for (const AttentionFwdTile& tile : kAttentionFwdTiles) {
    int const block =
        attention_fwd_shared_memory(head_dim, head_dim_v, tile.block_q, tile.block_kv) +
        kReservedSharedMemory;
    if (head_dim_v <= tile.max_head_dim &&
        tile.blocks_per_sm * block <= shared_memory + kReservedSharedMemory) {
      return tile;
    }
  }
  return {};
}

// kFeatures: of the kernels that evaluate ScoreFeatures.
template <class Target, class Dtype_, int kMaxHeadDim, int kMaxHeadDimV, bool kFeatures_>
struct AttentionFwdConfig {
  using Dtype = Dtype_;
  static constexpr bool kFeatures = kFeatures_;
  static constexpr AttentionFwdTile kTile =
      attention_fwd_tile(kMaxHeadDim, kMaxHeadDimV, Target::kSharedMemory);
  static_assert(kTile.warps > 0, "no tile of this head dim fits the target's shared memory");

  static constexpr int kHeadDim = padded_head_dim(kMaxHeadDim);
  static constexpr int kHeadDimV = padded_head_dim(kMaxHeadDimV);
  static constexpr int kBlockQ = kTile.block_q;
  static constexpr int kBlockKV = kFeatures ? kTile.block_kv_features : kTile.block_kv;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = kTile.blocks_per_sm;
  static constexpr int kWarpRows = kBlockQ / kWarps;
  static_assert(kWarpRows % 16 == 0, "a warp owns whole mma tiles");

  using SmemLayoutQ = SmemLayout<kBlockQ, kHeadDim>;
  using SmemLayoutK = SmemLayout<kBlockKV, kHeadDim>;
  using SmemLayoutV = SmemLayout<kBlockKV, kHeadDimV>;
  using SmemLayoutO = SmemLayout<kBlockQ, kHeadDimV>;
  static_assert(SmemLayoutO::kBytes <= SmemLayoutQ::kBytes + SmemLayoutK::kBytes,
                "O is written while V is read");
  static constexpr int kSharedMemory =
      attention_fwd_shared_memory(kMaxHeadDim, kMaxHeadDimV, kBlockQ, kBlockKV);
};

}  // namespace flashvar::sm80
