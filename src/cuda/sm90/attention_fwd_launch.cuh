// Launches attention_fwd_kernel: tensor maps, grid, shared memory.
#pragma once
#include "abi/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/tensor_map.h"
#include "sm90/attention_fwd.cuh"

namespace flashvar::sm90 {

template <class Target, class Dtype, int kHeadDim>
struct AttentionFwdLaunch {
  using Config = AttentionFwdConfig<Target, Dtype, kHeadDim>;

  static constexpr AttentionFwdKernel row() { return {Dtype::kAbi, kHeadDim, kHeadDim, &launch}; }

  static constexpr KernelFacts facts(const char* name) {
    return KernelFacts::make(name, Config::kThreads, Config::kSharedMemory, Config::kBlockQ,
                             Config::kBlockKV);
  }

 private:
  static cudaError_t launch(const AttentionFwdProblem& problem, int device, cudaStream_t stream) {
    AttentionFwdArguments arguments;
    arguments.problem = problem;
    bool const bf16 = Dtype::kAbi == 0;
    TensorSizes const queries{problem.batch, problem.queries.seqlen, problem.heads_q,
                              problem.head_dim};
    TensorSizes const keys{problem.batch, problem.keys.seqlen, problem.heads_q / problem.group,
                           problem.head_dim};
    cudaError_t error = encode_tensor_map(arguments.q, problem.q, queries, bf16, Config::kBlockQ);
    if (error == cudaSuccess) {
      error = encode_tensor_map(arguments.k, problem.k, keys, bf16, Config::kBlockKV);
    }
    if (error == cudaSuccess) {
      error = encode_tensor_map(arguments.v, problem.v, keys, bf16, Config::kBlockKV);
    }
    if (error != cudaSuccess) return error;
    int multiprocessors = 0;
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    int64_t const heads = problem.batch * problem.heads_q;
    int64_t const per_head = problem.queries.tiles(1, Config::kBlockQ);
    arguments.paired =
        problem.window_right != kUnbounded && heads * per_head >= 2 * multiprocessors;
    int64_t const items = heads * (arguments.paired ? (per_head + 1) / 2 : per_head);
    arguments.items = static_cast<uint32_t>(items);
    LaunchShape const shape{items < multiprocessors ? items : multiprocessors, Config::kThreads,
                            Config::kSharedMemory};
    return launch_kernel<attention_fwd_kernel<Config>>(arguments, shape, device, stream);
  }
};

}  // namespace flashvar::sm90
