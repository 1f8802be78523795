// Attention forward for at most 32 rows, as decoding has: with wgmma half of a tile or more
// would not exist. Scores are transposed, so that their rows are keys, and all lanes have
// elements of rows that exist. Each of four warps goes through a quarter of the keys of each block
// by itself, with mma.sync, or with 32 rows through half of the keys for half of the rows; the
// warps' results are merged once. A fifth warp issues the TMA loads. A block has one tile, or one
// split of it. Device code only; launched by fwd_few_launch.cuh.
#pragma once
#include <cstdint>

#include "core/divisor.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention/fwd_few_consumer.cuh"
#include "sm90/attention/fwd_few_results.cuh"
#include "sm90/attention/fwd_loads.cuh"
#include "sm90/attention/query_tile.cuh"

namespace flashvar::sm90::attention {

struct FewArgs {
  FwdProblem problem;  // simplified, with its splits
  CUtensorMap q, k, v;
  Divisor heads_divisor, group_divisor, splits_divisor;  // heads: of all splits
  uint32_t heads;
  uint32_t stages;  // buffers of K, and of V
  bool in_cluster;  // FewSplits
  FewOutput call;
};

// Position in a ring of buffers, as PipelineState, for a number of stages known at launch.
struct RingPosition {
  uint32_t stage = 0, phase = 0;

  __device__ __forceinline__ void advance(uint32_t stages) {
    if (++stage < stages) return;
    stage = 0;
    phase ^= 1;
  }
};

// The load warp: issues all TMA loads, in the order in which they are needed.
template <class Config>
__device__ __forceinline__ void few_produce(const FewArgs& args, const FewSmem<Config>& smem,
                                            const QueryTile<Config>& tile) {
  const FwdProblem& problem = args.problem;
  uint32_t const batch_k = problem.keys.offsets == nullptr ? tile.batch : 0;
  load_members<Config>(smem.q(), &args.q, smem.full_q(), tile.row_q, tile.head,
                       problem.batch_of_queries(tile.batch));
  RingPosition at;
  for (int32_t n = tile.end - 1; n >= tile.begin; --n) {
    int32_t const row = tile.row_k + n * Config::kBlockKV;
    ptx::mbarrier_wait(smem.empty_k(at.stage), at.phase ^ 1);  // all warps have read this stage's K
    load_tile<Config::kColBlocks, Config::kColBlockBytesKV>(
        smem.k(at.stage), &args.k, smem.full_k(at.stage), ptx::CacheHint::kEvictLast, row,
        tile.head_kv, batch_k);
    ptx::mbarrier_wait(smem.empty_v(at.stage), at.phase ^ 1);  // and V
    load_tile<Config::kColBlocksV, Config::kColBlockBytesKV>(
        smem.v(at.stage), &args.v, smem.full_v(at.stage), ptx::CacheHint::kEvictLast, row,
        tile.head_kv, batch_k);
    at.advance(args.stages);
  }
}

// One of the warps that compute.
template <class Config>
__device__ __forceinline__ void few_consume(const FewArgs& args, const FewSmem<Config>& smem,
                                            const QueryTile<Config>& tile,
                                            const FewStore<Config>& store) {
  using Consumer = FewConsumer<Config>;
  const FwdProblem& problem = args.problem;
  bool const foreign_tail = problem.has_foreign_tail();
  auto const release = [](uint32_t barrier) {
    __syncwarp();  // all lanes have read the buffer
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(barrier);
  };
  Consumer consumer(ptx::thread_index() / 32);
  if (tile.has_keys()) {
    ptx::mbarrier_wait(smem.full_q(), 0);  // Q is loaded
    consumer.load_q(smem.q());
  }
  RingPosition at;
#pragma unroll 1
  for (int32_t n = tile.end - 1; n >= tile.begin; --n) {
    int32_t const first_key = n * Config::kBlockKV + consumer.first_key;
    ptx::mbarrier_wait(smem.full_k(at.stage), at.phase);  // K(n) is loaded
    consumer.multiply_k(smem.k(at.stage));
    consumer.update_maxima(problem, tile, first_key);
    // Not before: here all scores have been compared, so ldmatrix has read K. ptxas moves an
    // earlier arrival to between the last ldmatrix and its mma, and then TMA may overwrite K first.
    // That was seen on GPUs that several processes share.
    release(smem.empty_k(at.stage));
    consumer.exponentiate(problem.scale_log2);
    ptx::mbarrier_wait(smem.full_v(at.stage), at.phase);  // V(n) is loaded
    int32_t const existing = tile.mask.seqlen_k - first_key;
    if (foreign_tail && existing < Consumer::kKeys) {
      consumer.template multiply_v<true>(smem.v(at.stage), existing);
    } else {
      consumer.template multiply_v<false>(smem.v(at.stage), existing);
    }
    release(smem.empty_v(at.stage));
    at.advance(args.stages);
  }
  store(consumer);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSM)
    fwd_few_kernel(const __grid_constant__ FewArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  FewSmem<Config> const smem{ptx::smem_address(shared)};
  const FwdProblem& problem = args.problem;
  if (threadIdx.x == 32 * kFewWarps) smem.init_barriers();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  // fwd_merge_kernel may start now, as after fwd_kernel (fwd.cuh).
  if (problem.splits.out != nullptr) ptx::griddepcontrol_launch_dependents();
  uint32_t const batch = blockIdx.x / args.heads_divisor;
  QueryTile<Config> tile(args, WorkTile{batch, blockIdx.x - batch * args.heads, 0});
  // A sequence without queries loads nothing.
  if (args.call.queries.span(batch).count == 0) tile.end = tile.begin;
  FewStore<Config> const store{args.call, problem, tile, smem.results(), args.in_cluster};
  __syncthreads();  // mbarriers are initialized
  if (threadIdx.x < 32 * kFewWarps) {
    few_consume<Config>(args, smem, tile, store);
    return;
  }
  if (tile.has_keys()) few_produce<Config>(args, smem, tile);
  if (args.call.queries.offsets != nullptr) store.store_other_rows();
}

}  // namespace flashvar::sm90::attention
