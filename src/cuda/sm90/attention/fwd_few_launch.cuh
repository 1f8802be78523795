// Launches the forward for few rows.
#pragma once
#include <algorithm>
#include <cstdint>

#include "attention/fwd_merge.cuh"
#include "attention/key_splits.h"
#include "core/dtype.cuh"
#include "core/launch_cluster.h"
#include "core/tensor_map.h"
#include "sm90/attention/fwd_few.cuh"
#include "sm90/attention/fwd_few_splits.h"
#include "sm90/attention/tensor_maps.h"

namespace flashvar::sm90::attention {

// `problem`: simplified, with at most Config::kBlockQ rows and with its splits. `call`: as it was
// before.
template <class Target, class Config>
cudaError_t launch_fwd_few(const FwdProblem& call, FwdProblem problem, FewSplits splits, int device,
                           cudaStream_t stream) {
  static_assert(Config::shared_memory(Config::kMaxStages) <= Target::kSharedMemory &&
                Target::blocks_that_fit(Config::shared_memory(1)) >= Config::kBlocksPerSM);
  using Launch = ClusterLaunch<fwd_few_kernel<Config>, Target::kSharedMemory>;
  if (splits.in_cluster && !Launch::runs_clusters(kMaxCluster, Config::kThreads, device)) {
    splits = {1, false};
    problem.splits.count = 1;
  }
  FewArgs args;
  args.problem = problem;
  args.call = FewOutput(call);
  TensorMapEncoder const encoder{problem, tensor_map_type<typename Config::Dtype>()};
  cudaError_t error = encoder.members(args.q, problem.q, problem.head_dim, Config::kBlockQ);
  if (error == cudaSuccess) {
    error = encoder.keys(args.k, problem.k, problem.head_dim, Config::kBlockKV);
  }
  if (error == cudaSuccess) {
    error = encoder.keys(args.v, problem.v, problem.head_dim_v, Config::kBlockKV);
  }
  int multiprocessors = 0;
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  int64_t const heads = int64_t{problem.heads_q} * splits.count, blocks = heads * problem.batch;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  FewSharing const sharing = FewSharing::choose<Config>(blocks, multiprocessors);
  args.heads = static_cast<uint32_t>(heads);
  args.heads_divisor = Divisor::make(args.heads);
  args.group_divisor = Divisor::make(problem.group);
  args.splits_divisor = Divisor::make(splits.count);
  args.stages = static_cast<uint32_t>(sharing.stages);
  args.in_cluster = splits.in_cluster;
  // A block that shares its SM with none takes more than half of the shared memory: two would load
  // no faster, and could start on one SM while others are idle. Those that share may start only
  // when all SMs are free, for the same reason.
  bool const alone = sharing.blocks_per_sm == 1;
  int const used = Config::shared_memory(sharing.stages);
  LaunchShape const shape{blocks, Config::kThreads,
                          alone ? std::max(used, Target::kSharedMemory / 2 + 1024) : used, alone};
  error = Launch::launch(args, shape, splits.in_cluster ? splits.count : 1, device, stream);
  if (problem.splits.out != nullptr && error == cudaSuccess) {
    error = launch_fwd_merge<Target, typename Config::Dtype>(call, problem.splits, device, stream);
  }
  return error;
}

}  // namespace flashvar::sm90::attention
