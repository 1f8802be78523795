// Launches the dQ kernel.
#pragma once
#include "core/launch.h"
#include "core/tensor_map.h"
#include "sm90/attention/bwd_dq.cuh"
#include "sm90/attention/key_tile.cuh"
#include "sm90/attention/tensor_maps.h"

namespace flashvar::sm90::attention {

// Fills the dQ kernel's arguments. `bwd_args`: those of the dK and dV kernel, with which it shares
// LSE and delta. `counter`: zeroed by the preprocess kernel. One CTA runs on an SM.
template <class Config>
cudaError_t make_dq_args(BwdDqArgs& args, const BwdArgs& bwd_args, uint32_t* counter,
                         int multiprocessors) {
  BwdProblem const& problem = bwd_args.problem;
  args.problem = problem;
  args.lse_log2 = bwd_args.lse_log2;
  args.delta = bwd_args.delta;
  args.query_tiles = bwd_args.query_tiles;
  if (!args.init(problem, Config::kBlockQ, multiprocessors, 1, counter)) {
    return cudaErrorInvalidConfiguration;
  }
  TensorMapEncoder const encoder{problem, tensor_map_type<typename Config::Dtype>()};
  return encode_bwd_tensor_maps(args, encoder, Config::kBlockQ, Config::kBlockKV);
}

template <class Config>
cudaError_t launch_dq(const BwdDqArgs& args, int device, cudaStream_t stream) {
  LaunchShape const shape{args.ctas, Config::kThreads, Config::kSharedMemory, true};
  return launch_kernel<bwd_dq_kernel<Config>>(args, shape, device, stream);
}

}  // namespace flashvar::sm90::attention
