// Launches the backward: its kernels in order, and their grids.
#pragma once
#include <algorithm>

#include "attention/bwd_preprocess.cuh"
#include "attention/explain.h"
#include "attention/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "sm80/attention/bwd.cuh"
#include "sm80/attention/bwd_convert.cuh"
#include "sm80/attention/bwd_dq.cuh"
#include "sm80/attention/bwd_workspace.cuh"

namespace flashvar::sm80::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct BwdLaunch {
  template <bool kModifiers>
  using Config = BwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kModifiers>;
  using DqConfig = BwdDqConfig<Target, Dtype, kHeadDim, kHeadDimV>;

  static constexpr AttentionBwdKernel row() {
    return {Dtype::kAbi, kHeadDim, kHeadDimV, {&workspace, &launch, &explain_mma_sync<BwdProblem>}};
  }

  static constexpr KernelFactsList<5> facts(const char* row, const char* when = "every call") {
    using C = Config<false>;  // that with modifiers has the same tiles
    using Dq = DqConfig;
    KernelFactsMaker const maker{row, "mma.sync", when};
    return {{maker.make("bwd_kernel", C::kThreads, C::kSharedMemory, C::kBlockQ, C::kBlockKV),
             maker.make("bwd_preprocess_kernel", kPreprocessThreads, 0, C::kBlockQ),
             maker.make("bwd_dq_kernel, deterministic", Dq::kThreads, Dq::kSharedMemory,
                        Dq::kBlockQ, Dq::kBlockKV),
             maker.make("bwd_convert_kernel, summed dQ", 32 * C::GradQ::kWarps, 0, C::kBlockQ),
             maker.make("bwd_convert_kernel, split tiles", 32 * C::GradK::kWarps, 0, C::kBlockKV)}};
  }

  static uint64_t workspace(const BwdProblem& problem) {
    BwdArgs args;
    return std::max(plan_bwd<Config<false>>(problem, args).end,
                    plan_bwd<Config<true>>(problem, args).end);
  }

  static cudaError_t launch(const BwdProblem& problem, int device, cudaStream_t stream) {
    bool const aligned = problem.rows_are_aligned();
    return problem.has_modifiers() || !aligned
               ? launch_variant<Config<true>>(problem, aligned, device, stream)
               : launch_variant<Config<false>>(problem, aligned, device, stream);
  }

 private:
  template <class C>
  static cudaError_t launch_variant(const BwdProblem& problem, bool aligned, int device,
                                    cudaStream_t stream) {
    BwdArgs args;
    BwdWorkspace const parts = plan_bwd<C>(problem, args);
    args.aligned = aligned;
    const BiasView& bias = problem.grad_bias;
    args.shared_bias = (bias.batch_stride == 0 && problem.batch > 1) ||
                       (bias.head_stride == 0 && problem.heads_q > 1) || bias.query_stride == 0;
    int64_t const heads_kv = problem.heads_q / problem.group;
    cudaError_t error = cudaSuccess;
    if (parts.end > parts.sums_begin) {
      error = cudaMemsetAsync(problem.workspace + parts.sums_begin, 0, parts.end - parts.sums_begin,
                              stream);
    }
    auto run = [&](auto launch_it, int64_t blocks) {
      if (error == cudaSuccess && blocks > 0) error = launch_it(blocks);
    };
    run(
        [&](int64_t blocks) {
          PreprocessArgs preprocess{problem};
          preprocess.lse_log2 = args.lse_log2;
          preprocess.delta = args.delta;
          preprocess.zero_grad_q = args.one_key_tile;
          preprocess.query_tiles = args.query_tiles;
          preprocess.aligned = aligned;
          return launch_kernel<bwd_preprocess_kernel<Dtype, C::kBlockQ>>(
              preprocess, {blocks, kPreprocessThreads, 0}, device, stream);
        },
        std::max<int64_t>(args.query_tiles * problem.heads_q, 1));
    run(
        [&](int64_t blocks) {
          return launch_kernel<bwd_kernel<C>>(args, {blocks, C::kThreads, C::kSharedMemory}, device,
                                              stream);
        },
        args.key_tiles * heads_kv * args.head_parts * args.query_parts);
    if (args.one_key_tile) {
      // The main kernel has stored dQ.
    } else if (problem.deterministic) {
      run(
          [&](int64_t blocks) {
            return launch_kernel<bwd_dq_kernel<DqConfig, C::kBlockQ>>(
                args, {blocks, DqConfig::kThreads, DqConfig::kSharedMemory}, device, stream);
          },
          QueryTile::tiles(problem, DqConfig::kBlockQ) * problem.heads_q);
    } else {
      run(
          [&](int64_t blocks) {
            return convert<typename C::GradQ>(
                args.grad_q_sum, problem.grad_q, problem.queries, args.query_tiles,
                problem.head_dim, problem.modifiers.scale, args, blocks, device, stream);
          },
          args.query_tiles * problem.heads_q);
    }
    if (args.grad_k_sum != nullptr) {
      run(
          [&](int64_t blocks) {
            return convert<typename C::GradK>(
                args.grad_k_sum, problem.grad_k, problem.keys, args.key_tiles, problem.head_dim,
                problem.modifiers.scale, args, blocks, device, stream);
          },
          args.key_tiles * heads_kv);
      run(
          [&](int64_t blocks) {
            return convert<typename C::GradV>(args.grad_v_sum, problem.grad_v, problem.keys,
                                              args.key_tiles, problem.head_dim_v, 1.f, args, blocks,
                                              device, stream);
          },
          args.key_tiles * heads_kv);
    }
    return error;
  }

  template <class Tile>
  static cudaError_t convert(const float* sums, const Tensor& grad, const Sequences& sequences,
                             int64_t tiles, int32_t head_dim, float scale, const BwdArgs& args,
                             int64_t blocks, int device, cudaStream_t stream) {
    ConvertArgs convert_args{sums, grad, sequences};
    convert_args.batch = args.batch;
    convert_args.tiles = tiles;
    convert_args.head_dim = head_dim;
    convert_args.scale = scale;
    convert_args.aligned = args.aligned;
    return launch_kernel<bwd_convert_kernel<Dtype, Tile>>(
        convert_args, {blocks, 32 * Tile::kWarps, 0}, device, stream);
  }
};

}  // namespace flashvar::sm80::attention
