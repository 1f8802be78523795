// Launches the kernel that computes dQ by itself.
#pragma once
#include <algorithm>

#include "core/launch.h"
#include "core/tensor_map.h"
#include "sm90/attention_bwd_maps.h"
#include "sm90/attention_bwd_pipeline.cuh"
#include "sm90/attention_bwd_queries.cuh"

namespace flashvar::sm90 {

// What the kernel is launched with. `keys`: what that of dK and dV is, of which this takes LSE and
// D. `counter` is 0 by then.
template <class Config>
cudaError_t make_bwd_queries(AttentionBwdQueriesArguments& arguments,
                             const AttentionBwdArguments& keys, uint32_t* counter,
                             int multiprocessors) {
  AttentionBwdProblem const& problem = keys.problem;
  arguments.problem = problem;
  arguments.lse_log2 = keys.lse_log2;
  arguments.row_sums = keys.row_sums;
  arguments.query_tiles = keys.query_tiles;
  if (!arguments.deal_out(problem, Config::kBlockQ, multiprocessors, counter)) {
    return cudaErrorInvalidConfiguration;
  }
  TensorMapMaker const make{problem, Config::Dtype::kAbi == dtype::bf16::kAbi};
  return make_bwd_maps(arguments, make, Config::kBlockQ, Config::kBlockKV);
}

template <class Config>
cudaError_t launch_bwd_queries(const AttentionBwdQueriesArguments& arguments, int device,
                               int multiprocessors, cudaStream_t stream) {
  LaunchShape const shape{std::min<int64_t>(arguments.items, multiprocessors), Config::kThreads,
                          Config::kSharedMemory, true};
  return launch_kernel<attention_bwd_queries_kernel<Config>>(arguments, shape, device, stream);
}

}  // namespace flashvar::sm90
