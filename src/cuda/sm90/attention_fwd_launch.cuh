// Launches attention_fwd_kernel: which copy of it, tensor maps, grid, shared memory.
#pragma once
#include <algorithm>

#include "abi/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/tensor_map.h"
#include "sm90/attention_fwd.cuh"

namespace flashvar::sm90 {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct AttentionFwdLaunch {
  template <Purpose kPurpose>
  using Config = AttentionFwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kPurpose>;
  using Plain = Config<Purpose::kPlain>;

  // Threads of the copy with the fewest, which have the most registers.
  static constexpr KernelFacts facts(const char* name) {
    constexpr int kThreads = std::min(
        {Plain::kThreads, Config<Purpose::kShort>::kThreads, Config<Purpose::kFeatures>::kThreads});
    return KernelFacts::make(name, kThreads, Plain::kSharedMemory, Plain::kBlockQ, Plain::kBlockKV);
  }

  // The copy engine takes rows that start on 16 bytes alone.
  static bool serves(const AttentionFwdProblem& problem) {
    return problem.rows_are_aligned() && tensor_map_encoder() != nullptr;
  }

  static cudaError_t launch(const AttentionFwdProblem& problem, int device, cudaStream_t stream) {
    using Short = Config<Purpose::kShort>;
    if (problem.has_features()) {
      return launch_copy<Config<Purpose::kFeatures>>(problem, device, stream);
    }
    if constexpr (Short::kTile.purpose == Purpose::kShort) {
      if (problem.keys.seqlen <= Short::kTile.few_keys || problem.window_left != kUnbounded ||
          (Short::kTile.causal && problem.window_right != kUnbounded)) {
        return launch_copy<Short>(problem, device, stream);
      }
    }
    return launch_copy<Plain>(problem, device, stream);
  }

 private:
  template <class Copy>
  static cudaError_t launch_copy(const AttentionFwdProblem& problem, int device,
                                 cudaStream_t stream) {
    AttentionFwdArguments arguments;
    arguments.problem = problem;
    TensorMapMaker const make{problem, Dtype::kAbi == dtype::bf16::kAbi};
    cudaError_t error = make.queries(arguments.q, problem.q, problem.head_dim, Copy::kBlockQ);
    if (error == cudaSuccess) {
      error = make.keys(arguments.k, problem.k, problem.head_dim, Copy::kBlockKV);
    }
    if (error == cudaSuccess) {
      error = make.keys(arguments.v, problem.v, problem.head_dim_v, Copy::kBlockKV);
    }
    int multiprocessors = 0;
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    if (!arguments.deal_out(problem, Copy::kBlockQ, multiprocessors, problem.counter)) {
      return cudaErrorInvalidConfiguration;
    }
    if (arguments.next_item != nullptr) {
      error = cudaMemsetAsync(arguments.next_item, 0, sizeof(uint32_t), stream);
    }
    if (error != cudaSuccess) return error;
    LaunchShape const shape{std::min<int64_t>(arguments.items, multiprocessors), Copy::kThreads,
                            Copy::kSharedMemory};
    return launch_kernel<attention_fwd_kernel<Copy>>(arguments, shape, device, stream);
  }
};

}  // namespace flashvar::sm90
