// dQ by itself, for the deterministic mode: a block owns kBlockQ queries of one head and walks the
// keys that they see, like the forward, so that one block alone sums up each row. The scores are
// computed once more for it.
#pragma once
#include <cstdint>

#include "sm80/attention_bwd.cuh"
#include "sm80/attention_fwd_block.cuh"

namespace flashvar::sm80 {

template <class Target, class Dtype_, int kMaxHeadDim, int kMaxHeadDimV>
struct AttentionBwdQueriesConfig {
  using Dtype = Dtype_;
  static constexpr bool kFeatures = true;  // one copy serves all calls
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
                                       static_cast<int>(sizeof(Block));
  static_assert(kSharedMemory <= Target::kSharedMemory, "the tile fits every target");
  static constexpr int kBlocksPerSM =
      2 * (kSharedMemory + kReservedSharedMemory) <= Target::kSharedMemory + kReservedSharedMemory
          ? 2
          : 1;
};

// kRowsBlockQ: the tile of queries that args.lse_log2 and args.row_sums are padded to.
template <class Config, int kRowsBlockQ>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSM)
    attention_bwd_queries_kernel(const __grid_constant__ AttentionBwdArguments args) {
  using Dtype = typename Config::Dtype;
  using LayoutQ = typename Config::SmemLayoutQ;
  using LayoutDO = typename Config::SmemLayoutDO;
  using LayoutK = typename Config::SmemLayoutK;
  using LayoutV = typename Config::SmemLayoutV;
  using Scores = Fragment<16, Config::kBlockKV>;

  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* const sQ = smem;  // later dQ
  unsigned char* const sdO = sQ + LayoutQ::kBytes;
  unsigned char* const sK = sdO + LayoutDO::kBytes;
  unsigned char* const sV = sK + LayoutK::kBytes;
  // The loop reads here what its accumulators leave no registers for.
  Block& sBlock = *reinterpret_cast<Block*>(sV + LayoutV::kBytes);

  Block const block(args, Config::kBlockQ);
  int32_t const queries = min(block.queries.count - block.first_query, Config::kBlockQ);
  if (queries <= 0) return;
  if (ptx::thread_index() == 0) sBlock = block;
  int32_t begin_n, end_n;
  {
    Mask const mask = block.mask(args);
    begin_n = mask.visible_begin(block.first_query) / Config::kBlockKV;
    end_n = (mask.visible_end(block.first_query + queries - 1) + Config::kBlockKV - 1) /
            Config::kBlockKV;
  }
  load_any_tile<LayoutQ, Config>(sQ, args.q.data + block.query_offset(args.q), args.q.seq_stride,
                                 queries, args.head_dim, args.aligned);
  load_any_tile<LayoutDO, Config>(sdO, args.grad_out.data + block.query_offset(args.grad_out),
                                  args.grad_out.seq_stride, queries, args.head_dim_v, args.aligned);
  ptx::cp_async_commit();

  int const warp_row = ptx::thread_index() / 32 * 16;
  float lse_log2[2], row_sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = warp_row + half * 8 + ptx::thread_index() % 32 / 4;
    int64_t const at =
        (block.head * args.query_tiles + args.queries.first_tile(block.batch, kRowsBlockQ)) *
            kRowsBlockQ +
        block.first_query + row;
    lse_log2[half] = row < queries ? args.lse_log2[at] : infinity();
    row_sum[half] = row < queries ? args.row_sums[at] : 0.f;
  }

  Fragment<16, Config::kHeadDim> rdQ;
  rdQ.clear();
  for (int32_t n = begin_n; n < end_n; ++n) {
    __syncthreads();  // at first sBlock is there for all; all are done with K(n - 1) and V(n - 1)
    int32_t const first_key = n * Config::kBlockKV;
    int32_t const rows = sBlock.keys.count - first_key;
    load_any_tile<LayoutK, Config>(
        sK, args.k.data + sBlock.key_offset(args.k, args.group) + first_key * args.k.seq_stride,
        args.k.seq_stride, rows, args.head_dim, args.aligned);
    load_any_tile<LayoutV, Config>(
        sV, args.v.data + sBlock.key_offset(args.v, args.group) + first_key * args.v.seq_stride,
        args.v.seq_stride, rows, args.head_dim_v, args.aligned);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();  // K(n) and V(n), and at first Q and dO, are there for all

    Scores rS, rdP;
    multiply_rows<Dtype, LayoutQ, LayoutK, Config::kHeadDim>(
        rS, ptx::smem_address(sQ) + warp_row * LayoutQ::kRowBytes, ptx::smem_address(sK));
    multiply_rows<Dtype, LayoutDO, LayoutV, Config::kHeadDimV>(
        rdP, ptx::smem_address(sdO) + warp_row * LayoutDO::kRowBytes, ptx::smem_address(sV));
    Mask const mask = sBlock.mask(args);
    int const lane = ptx::thread_index() % 32;
    ScorePlace const place{
        sBlock.batch,
        static_cast<int32_t>(sBlock.head),
        sBlock.first_query + warp_row + lane / 4,
        first_key + lane % 4 * 2,
        mask,
        mask.hides_any(sBlock.first_query, sBlock.first_query + Config::kBlockQ - 1, first_key,
                       first_key + Config::kBlockKV)};
    differentiate<false, Dtype>(
        rS, rdP, args, place, [&](int, int, int e) { return lse_log2[e / 2]; },
        [&](int, int, int e) { return row_sum[e / 2]; });
    multiply_columns<Dtype, LayoutK, Config::kBlockKV, 1>(
        rdQ, ptx::smem_address(sK) + fragment_offset<LayoutK>(),
        [&](uint32_t (&a)[4], int m, int kk) { pack_operand<Dtype>(a, rdP, m, kk); });
  }

  ptx::cp_async_wait<0>();
  __syncthreads();  // Q has arrived, if nobody waited for it, and all are done with it
  store_fragment<Dtype, LayoutQ>(sQ, rdQ, warp_row, args.features.scale, [](int n) { return n; });
  __syncthreads();  // dQ is complete
  store_any_tile<LayoutQ, Config>(args.grad_q.data + sBlock.query_offset(args.grad_q),
                                  args.grad_q.seq_stride, sQ, queries, args.head_dim, args.aligned);
}

}  // namespace flashvar::sm80
