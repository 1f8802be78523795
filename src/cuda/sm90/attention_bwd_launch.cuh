// Launches the backward of the wgmma family: tensor maps, parts of the workspace, grids.
#pragma once
#include <algorithm>

#include "abi/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/tensor_map.h"
#include "sm90/attention_bwd.cuh"
#include "sm90/attention_bwd_maps.h"
#include "sm90/attention_bwd_queries_launch.cuh"
#include "sm90/attention_bwd_round.cuh"
#include "smxx/attention_bwd_rows.cuh"

namespace flashvar::sm90 {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct AttentionBwdLaunch {
  template <BwdPurpose kPurpose>
  using Config = AttentionBwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kPurpose>;
  // Its tiles are those of every copy.
  using Dense = Config<BwdPurpose::kDense>;

  static constexpr KernelFacts facts(const char* name) {
    return KernelFacts::make(name, Dense::kThreads, Dense::kSharedMemory, Dense::kBlockQ,
                             Dense::kBlockKV);
  }

  static bool suits(const AttentionBwdProblem& problem) {
    return problem.features.bias.data == nullptr && !are_short(problem.queries, problem.batch) &&
           problem.queries.seqlen > 0 && problem.keys.seqlen > 0;
  }

  // The copy engine takes rows that start on 16 bytes alone.
  static bool serves(const AttentionBwdProblem& problem) {
    return suits(problem) && problem.rows_are_aligned() && tensor_map_encoder() != nullptr;
  }

  static uint64_t workspace(const AttentionBwdProblem& problem) { return plan(problem).end; }

  // Whether dQ is summed up in the workspace.
  static bool sums_grad_q(const AttentionBwdProblem& problem) {
    return Dense::kGradQ && !problem.deterministic;
  }

  static cudaError_t launch(const AttentionBwdProblem& problem, int device, cudaStream_t stream) {
    bool const ragged = problem.queries.offsets != nullptr || problem.keys.offsets != nullptr ||
                        problem.seqused_k != nullptr;
    if constexpr (Dense::kGradQ) {
      if (problem.deterministic) {
        return problem.has_features()
                   ? launch_copy<Config<BwdPurpose::kKeysFeatures>>(problem, device, stream)
                   : launch_copy<Config<BwdPurpose::kKeys>>(problem, device, stream);
      }
    }
    return problem.has_features()
               ? launch_copy<Config<BwdPurpose::kFeatures>>(problem, device, stream)
           : ragged ? launch_copy<Config<BwdPurpose::kRagged>>(problem, device, stream)
                    : launch_copy<Dense>(problem, device, stream);
  }

 private:
  static constexpr int64_t kFewestRows = 32;

  // Every sequence has tiles of its own in the workspace: of these, most would be padding.
  static bool are_short(const Sequences& sequences, int64_t batch) {
    return sequences.offsets != nullptr && sequences.total < kFewestRows * batch;
  }

  template <class Copy>
  static cudaError_t launch_copy(const AttentionBwdProblem& problem, int device,
                                 cudaStream_t stream) {
    Workspace const parts = plan(problem);
    AttentionBwdArguments arguments{problem};
    arguments.lse_log2 = reinterpret_cast<float*>(problem.workspace);
    arguments.row_sums = reinterpret_cast<float*>(problem.workspace + parts.row_sums);
    arguments.grad_q_sum =
        Copy::kGradQ ? reinterpret_cast<float*>(problem.workspace + parts.grad_q_sum) : nullptr;
    arguments.next_item = reinterpret_cast<uint32_t*>(problem.workspace + parts.next_item);
    int64_t const query_tiles = problem.queries.tiles(problem.batch, Dense::kBlockQ);
    arguments.query_tiles = static_cast<int32_t>(query_tiles);
    TensorMapMaker const make{problem, Dtype::kAbi == dtype::bf16::kAbi, Copy::kRagged};
    cudaError_t error = make_bwd_maps(arguments, make, Dense::kBlockQ, Dense::kBlockKV);
    int multiprocessors = 0;
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    bool const packed = problem.keys.offsets != nullptr;
    int64_t const heads = (packed ? 1 : problem.batch) * (problem.heads_q / problem.group);
    int64_t const tiles = problem.keys.tiles(packed ? problem.batch : 1, Copy::kBlockKV);
    arguments.paired =
        !Copy::kRagged && problem.window_right != kUnbounded && heads * tiles > multiprocessors;
    int64_t const row_items = arguments.paired ? (tiles + 1) / 2 : tiles;
    if (heads * row_items > INT32_MAX || query_tiles * problem.heads_q > INT32_MAX) {
      return cudaErrorInvalidConfiguration;
    }
    arguments.row_items = static_cast<uint32_t>(row_items);
    arguments.items = static_cast<uint32_t>(heads * row_items);
    using Queries = AttentionBwdQueriesConfig<Target, Dtype, kHeadDim, kHeadDimV, Copy::kFeatures>;
    AttentionBwdQueriesArguments queries;
    if (!Copy::kGradQ && error == cudaSuccess) {
      error =
          make_bwd_queries<Queries>(queries, arguments, arguments.next_item + 1, multiprocessors);
    }
    if (error == cudaSuccess) error = launch_rows<Copy>(arguments, device, stream);
    if (error == cudaSuccess) {
      LaunchShape const shape{std::min<int64_t>(arguments.items, multiprocessors), Copy::kThreads,
                              Copy::kSharedMemory, true};
      error = launch_kernel<attention_bwd_kernel<Copy>>(arguments, shape, device, stream);
    }
    if (error != cudaSuccess) return error;
    if constexpr (Copy::kGradQ) {
      return launch_kernel<attention_bwd_round_kernel<Copy>>(
          arguments, {query_tiles * problem.heads_q, 256, 0, true}, device, stream);
    } else {
      return launch_bwd_queries<Queries>(queries, device, multiprocessors, stream);
    }
  }

  struct Workspace {
    uint64_t row_sums, grad_q_sum, next_item, end;  // LSE comes first
  };

  static Workspace plan(const AttentionBwdProblem& problem) {
    uint64_t const tiles = problem.queries.tiles(problem.batch, Dense::kBlockQ) * problem.heads_q;
    uint64_t const rows = (tiles * Dense::kRowBytes + 255) / 256 * 256;
    uint64_t const sums = sums_grad_q(problem) ? tiles * Dense::kTileElements * sizeof(float) : 0;
    return {rows, 2 * rows, 2 * rows + sums, 2 * rows + sums + 256};
  }

  // D, the LSE in base 2, and zeros: of dQ, where it is summed up, and of the counters.
  template <class Copy>
  static cudaError_t launch_rows(const AttentionBwdArguments& arguments, int device,
                                 cudaStream_t stream) {
    smxx::AttentionBwdRowsArguments const rows{arguments.problem,
                                               const_cast<float*>(arguments.lse_log2),
                                               const_cast<float*>(arguments.row_sums),
                                               arguments.grad_q_sum,
                                               Copy::kTileElements,
                                               arguments.query_tiles,
                                               true,
                                               arguments.next_item};
    return launch_kernel<smxx::attention_bwd_rows_kernel<Dtype, Dense::kBlockQ>>(
        rows, {int64_t{arguments.query_tiles} * arguments.problem.heads_q, smxx::kRowThreads, 0},
        device, stream);
  }
};

}  // namespace flashvar::sm90
