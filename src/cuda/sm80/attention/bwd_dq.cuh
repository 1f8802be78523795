// dQ in a kernel of its own, for the deterministic mode of sequences of several key tiles. A block
// owns kBlockQ queries of one head and iterates over the keys visible to them, as in the forward,
// so that no other block adds to its rows. It recomputes the scores.
#pragma once
#include <cstdint>

#include "core/ceil_div.h"
#include "sm80/attention/bwd.cuh"
#include "sm80/attention/query_tile.cuh"

namespace flashvar::sm80::attention {

template <class Target, class Dtype_, int kMaxHeadDim, int kMaxHeadDimV>
struct BwdDqConfig {
  using Dtype = Dtype_;
  static constexpr bool kModifiers = true;  // one variant for all calls
  static constexpr int kHeadDim = padded_head_dim(kMaxHeadDim);
  static constexpr int kHeadDimV = padded_head_dim(kMaxHeadDimV);
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockQ = 16 * kWarps;
  static constexpr int kBlockKV = kHeadDim + kHeadDimV > 256 ? 32 : 64;
  using SmemLayoutQ = SmemLayout<kBlockQ, kHeadDim>;
  using SmemLayoutDO = SmemLayout<kBlockQ, kHeadDimV>;
  using SmemLayoutK = SmemLayout<kBlockKV, kHeadDim>;
  using SmemLayoutV = SmemLayout<kBlockKV, kHeadDimV>;
  static constexpr int kSharedMemory = SmemLayoutQ::kBytes + SmemLayoutDO::kBytes +
                                       SmemLayoutK::kBytes + SmemLayoutV::kBytes +
                                       static_cast<int>(sizeof(QueryTile));
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile must fit every target");
  static constexpr int kBlocksPerSM = Target::blocks_that_fit(kSharedMemory) >= 2 ? 2 : 1;
};

// kPaddedBlockQ: queries of the tiles to which args.lse_log2 and args.delta are padded.
template <class Config, int kPaddedBlockQ>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSM)
    bwd_dq_kernel(const __grid_constant__ BwdArgs args) {
  using Dtype = typename Config::Dtype;
  using LayoutQ = typename Config::SmemLayoutQ;
  using LayoutDO = typename Config::SmemLayoutDO;
  using LayoutK = typename Config::SmemLayoutK;
  using LayoutV = typename Config::SmemLayoutV;
  using Scores = Accumulator<16, Config::kBlockKV>;

  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* const sQ = smem;  // later dQ
  unsigned char* const sdO = sQ + LayoutQ::kBytes;
  unsigned char* const sK = sdO + LayoutDO::kBytes;
  unsigned char* const sV = sK + LayoutK::kBytes;
  // Constants of the main loop, in shared memory because the accumulators leave no registers for
  // them.
  QueryTile& sTile = *reinterpret_cast<QueryTile*>(sV + LayoutV::kBytes);

  QueryTile const tile(args, Config::kBlockQ);
  int32_t const queries = min(tile.queries.count - tile.first_query, Config::kBlockQ);
  if (queries <= 0) return;
  if (ptx::thread_index() == 0) sTile = tile;
  int32_t begin_n, end_n;
  {
    Mask const mask = tile.mask(args);
    begin_n = mask.key_begin(tile.first_query) / Config::kBlockKV;
    end_n = ceil_div(mask.key_end(tile.first_query + queries - 1), Config::kBlockKV);
  }
  load_any_tile<LayoutQ, Config>(sQ, args.q.data + tile.query_offset(args.q), args.q.seq_stride,
                                 queries, args.head_dim, args.aligned);
  load_any_tile<LayoutDO, Config>(sdO, args.grad_out.data + tile.query_offset(args.grad_out),
                                  args.grad_out.seq_stride, queries, args.head_dim_v, args.aligned);
  ptx::cp_async_commit();

  int const warp_row = ptx::thread_index() / 32 * 16;
  float lse_log2[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = warp_row + half * 8 + ptx::thread_index() % 32 / 4;
    int64_t const at =
        (tile.head * args.query_tiles + args.queries.first_tile(tile.batch, kPaddedBlockQ)) *
            kPaddedBlockQ +
        tile.first_query + row;
    lse_log2[half] = row < queries ? args.lse_log2[at] : infinity();
    delta[half] = row < queries ? args.delta[at] : 0.f;
  }

  Accumulator<16, Config::kHeadDim> rdQ;
  rdQ.clear();
  for (int32_t n = begin_n; n < end_n; ++n) {
    // All warps have read K and V of the previous step, whose buffers take K(n) and V(n). In the
    // first step: sTile is written.
    __syncthreads();
    int32_t const first_key = n * Config::kBlockKV;
    int32_t const rows = sTile.keys.count - first_key;
    load_any_tile<LayoutK, Config>(
        sK, args.k.data + sTile.key_offset(args.k, args.group) + first_key * args.k.seq_stride,
        args.k.seq_stride, rows, args.head_dim, args.aligned);
    load_any_tile<LayoutV, Config>(
        sV, args.v.data + sTile.key_offset(args.v, args.group) + first_key * args.v.seq_stride,
        args.v.seq_stride, rows, args.head_dim_v, args.aligned);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();  // K(n) and V(n) (first: Q and dO too) are visible to all warps

    Scores rS, rdP;
    gemm_nt<Dtype, LayoutQ, LayoutK, Config::kHeadDim>(
        rS, ptx::smem_address(sQ) + warp_row * LayoutQ::kRowBytes, ptx::smem_address(sK));
    gemm_nt<Dtype, LayoutDO, LayoutV, Config::kHeadDimV>(
        rdP, ptx::smem_address(sdO) + warp_row * LayoutDO::kRowBytes, ptx::smem_address(sV));
    Mask const mask = sTile.mask(args);
    int const lane = ptx::thread_index() % 32;
    BwdScoreOrigin const origin{
        sTile.batch,
        static_cast<int32_t>(sTile.head),
        sTile.first_query + warp_row + lane / 4,
        first_key + lane % 4 * 2,
        mask,
        mask.hides_any(sTile.first_query, sTile.first_query + Config::kBlockQ - 1, first_key,
                       first_key + Config::kBlockKV)};
    differentiate_with_modifiers<false, Dtype>(
        rS, rdP, args, origin, [&](int, int, int e) { return lse_log2[e / 2]; },
        [&](int, int, int e) { return delta[e / 2]; });
    gemm_nn<Dtype, Config::kBlockKV, 1>(
        rdQ, FragmentAddress<LayoutK>{ptx::smem_address(sK) + fragment_offset<LayoutK>()},
        [&](uint32_t (&a)[4], int m, int kk) { pack_a<Dtype>(a, rdP, m, kk); });
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // Q is loaded, even where the loop did not run, and all warps have read it
  store_accumulator<Dtype, LayoutQ>(sQ, rdQ, warp_row, args.modifiers.scale,
                                    [](int n) { return n; });
  __syncthreads();  // all warps have written dQ
  store_any_tile<LayoutQ, Config>(args.grad_q.data + sTile.query_offset(args.grad_q),
                                  args.grad_q.seq_stride, sQ, queries, args.head_dim, args.aligned);
}

}  // namespace flashvar::sm80::attention
