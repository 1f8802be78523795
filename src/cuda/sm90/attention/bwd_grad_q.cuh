// What becomes of dQ in the dK and dV kernel: key tiles add theirs to fp32 sums in the workspace,
// which bwd_convert.cuh converts. Where each sequence has one key tile there are no sums: the tile
// stores dQ.
#pragma once
#include <cstdint>

#include "ptx/special_registers.cuh"
#include "ptx/vectors.cuh"
#include "sm90/attention/bwd_scores.cuh"
#include "sm90/attention/key_tile.cuh"

namespace flashvar::sm90::attention {

// Offset of a thread's four accumulators of an mma tile in a warpgroup's part of the sums.
__device__ __forceinline__ uint32_t grad_q_offset(uint32_t thread, uint32_t tile) {
  return (tile * 128 + thread) * 4;
}

// Where a thread adds its elements of a warpgroup's part of a tile of dQ. `number`: query_tile().
template <class Config>
__device__ __forceinline__ float* grad_q_sums(const BwdArgs& args, uint32_t number,
                                              uint32_t warpgroup) {
  float* const part = args.grad_q_sum +
                      (uint64_t{number} * Config::kConsumers + warpgroup) * Config::kGradQElements;
  return part + grad_q_offset(ptx::thread_index() % 128, 0);
}

// Adds columns [kFirst, kFirst + kCols) of a warpgroup's part to the sums, atomically. One address
// and constant distances from it.
template <class Config, int kFirst = 0, int kCols = Config::kGradQCols>
__device__ __forceinline__ void add_grad_q(float* sums, const float (&grad)[kCols / 2]) {
#pragma unroll
  for (int n = 0; n < kCols / 8; ++n) {
    const float* const x = &grad[4 * n];
    ptx::global_add(sums + grad_q_offset(0, kFirst / 8 + n), x[0], x[1], x[2], x[3]);
  }
}

// Moves such an address by `tiles`. Code that adds in every step keeps the address and moves it: an
// address that nothing needs after the adds gives its registers to the next instructions, which
// then wait until the last add has left the queue. Nothing forces compilers to move it; nvcc 13.0
// does.
template <class Config>
__device__ __forceinline__ void move_grad_q_sums(float*& sums, int32_t tiles) {
  sums += int64_t{tiles} * Config::kTileElements;
}

// Adds these columns to the sums or, without sums, stores them.
template <class Config, int kFirst = 0, int kCols = Config::kGradQCols, class Tile>
__device__ __forceinline__ void put_grad_q(const BwdArgs& args, const Tile& tile, uint32_t number,
                                           uint32_t warpgroup, const float (&grad)[kCols / 2]) {
  if constexpr (Config::kStoresGradQ) {
    if (!Config::kAddsGradQ || args.stores_grad_q) {
      uint32_t const head = number / args.query_tiles;
      int32_t const m = static_cast<int32_t>(number - tile.query_tile(args, head, 0));
      int32_t const row = m * Config::kBlockQ + (Config::kSplitsRows ? warpgroup * 64 : 0);
      int32_t const column = kFirst + (Config::kSplitsRows ? 0 : warpgroup * Config::kGradQCols);
      // With more keys max_seqlen_k was too small, and several tiles store dQ: the result is NaN.
      bool const right = tile.mask.seqlen_k <= Config::kBlockKV;
      float const scale = right ? args.problem.modifiers.scale : nanf("");
      Tensor columns = args.problem.grad_q;
      columns.data += column;
      store_grad<Config, kCols>(columns, tile.batch, head, tile.query_rows(), grad, scale, row,
                                args.problem.head_dim - column);
      return;
    }
  }
  add_grad_q<Config, kFirst, kCols>(grad_q_sums<Config>(args, number, warpgroup), grad);
}

}  // namespace flashvar::sm90::attention
