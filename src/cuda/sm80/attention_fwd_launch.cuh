// Launches attention_fwd_kernel: grid, shared memory, and which of the two copies of it.
#pragma once
#include <climits>

#include "abi/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "sm80/attention_fwd.cuh"

namespace flashvar::sm80 {

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
    int64_t const tiles = problem.queries.tiles(problem.batch, Config::kBlockQ);
    LaunchShape const shape{tiles * problem.heads_q, Config::kThreads, Config::kSharedMemory};
    return rows_are_aligned(problem)
               ? launch_kernel<attention_fwd_kernel<Config, true>>(problem, shape, device, stream)
               : launch_kernel<attention_fwd_kernel<Config, false>>(problem, shape, device, stream);
  }

  static bool rows_are_aligned(const AttentionFwdProblem& problem) {
    for (const TensorView* tensor : {&problem.q, &problem.k, &problem.v, &problem.out}) {
      int64_t const strides = tensor->batch_stride | tensor->seq_stride | tensor->head_stride;
      if (reinterpret_cast<uintptr_t>(tensor->data) % kChunkBytes != 0 ||
          strides % kChunkElements != 0) {
        return false;
      }
    }
    return true;
  }
};

}  // namespace flashvar::sm80
