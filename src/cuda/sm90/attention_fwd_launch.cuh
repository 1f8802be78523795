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

    bool const packed = problem.queries.offsets != nullptr;
    int64_t const rows = packed ? problem.heads_q : problem.heads_q * problem.batch;
    int64_t const tiles = problem.queries.tiles(packed ? problem.batch : 1, Copy::kBlockQ);
    arguments.paired = problem.window_right != kUnbounded && rows * tiles > multiprocessors;
    int64_t const row_items = !arguments.paired ? tiles
                              : packed ? problem.queries.tiles(problem.batch, 2 * Copy::kBlockQ)
                                       : (tiles + 1) / 2;
    if (rows * row_items > INT32_MAX) return cudaErrorInvalidConfiguration;
    arguments.row_items = static_cast<uint32_t>(row_items);
    arguments.items = static_cast<uint32_t>(rows * row_items);
    arguments.by_row_items = Divisor::make(arguments.row_items);
    arguments.by_heads_q = Divisor::make(problem.heads_q);
    arguments.by_group = Divisor::make(problem.group);
    // Without more items than blocks nobody asks for another.
    bool const asked = packed && problem.counter != nullptr && arguments.items > multiprocessors;
    arguments.next_item = asked ? problem.counter : nullptr;
    if (asked) error = cudaMemsetAsync(problem.counter, 0, sizeof(uint32_t), stream);
    if (error != cudaSuccess) return error;
    LaunchShape const shape{std::min<int64_t>(arguments.items, multiprocessors), Copy::kThreads,
                            Copy::kSharedMemory};
    return launch_kernel<attention_fwd_kernel<Copy>>(arguments, shape, device, stream);
  }
};

}  // namespace flashvar::sm90
