// Launches the wgmma backward: its kernels in order, tensor maps, grids.
//
// Order: preprocess; dK and dV; the sum of their parts, if key tiles are divided
// (key_tile_splits.h); convert dQ, if it is summed, or the dQ kernel. All are programmatic
// dependent launches.
#pragma once
#include <optional>

#include "attention/bwd_preprocess.cuh"
#include "attention/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/tensor_map.h"
#include "sm90/attention/bwd.cuh"
#include "sm90/attention/bwd_convert.cuh"
#include "sm90/attention/bwd_dq_launch.cuh"
#include "sm90/attention/bwd_schedule.h"
#include "sm90/attention/bwd_sum.cuh"
#include "sm90/attention/bwd_support.h"
#include "sm90/attention/bwd_variants.h"
#include "sm90/attention/bwd_workspace.cuh"
#include "sm90/attention/tensor_maps.h"

namespace flashvar::sm90::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct BwdWgmmaLaunch {
  template <unsigned kVariant>
  using Config = BwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kVariant>;
  using Variants = BwdVariants<Target, Dtype, kHeadDim, kHeadDimV>;
  using Dense = Config<BwdVariant::kDense>;
  static constexpr bool kUpTo128 = Dense::kSplitsKeys;
  static constexpr const char* kWhen =
      "rows start on 16 bytes, so that TMA can address them; not with packed sequences of fewer "
      "than 32 queries on average, if they may have more than 64 keys";
  static constexpr const char* kWhenAbove128 =
      "rows start on 16 bytes, so that TMA can address them; not with packed sequences of fewer "
      "than 32 queries on average, nor with the gradient of a bias";

  static constexpr auto facts(const char* row) {
    using V = BwdVariant;
    KernelFactsMaker const maker{row, "wgmma", kUpTo128 ? kWhen : kWhenAbove128};
    KernelFactsList<5> const always{
        {facts<V::kDense>(maker, "bwd_kernel"), facts<V::kBias>(maker, "bwd_kernel, bias"),
         preprocess_facts<V::kDense>(maker, "bwd_preprocess_kernel"),
         maker.make("bwd_sum_kernel, split key tiles", kSumThreads, 0, kSumRows),
         dq_facts<true>(maker, "bwd_dq_kernel, bias")}};
    if constexpr (kUpTo128) {
      return join(
          always,
          KernelFactsList<8>{{dq_facts<false>(maker, "bwd_dq_kernel, deterministic"),
                              facts<V::kNoDq>(maker, "bwd_kernel, no dQ"),
                              facts<V::kNoDq | V::kBias>(maker, "bwd_kernel, no dQ, bias"),
                              facts<V::kSmall>(maker, "bwd_kernel, small tiles"),
                              facts<V::kSmall | V::kBias>(maker, "bwd_kernel, small tiles, bias"),
                              preprocess_facts<V::kSmall>(maker, "bwd_preprocess_kernel, small"),
                              convert_facts<V::kDense>(maker, "bwd_convert_kernel, summed dQ"),
                              convert_facts<V::kSmall>(maker, "bwd_convert_kernel, small tiles")}});
    } else {
      return join(always, KernelFactsList<1>{{dq_facts<false>(maker, "bwd_dq_kernel")}});
    }
  }

  // As bwd_unsupported().
  static const char* unsupported(const BwdProblem& problem) {
    return bwd_unsupported(problem, kUpTo128);
  }

  // Whether the wgmma kernels support the call: TMA needs rows that start on 16 bytes.
  static bool supports(const BwdProblem& problem) {
    return unsupported(problem) == nullptr && problem.rows_are_aligned() &&
           is_addressable(problem) && tensor_map_encoder() != nullptr;
  }

  // Whether tensor maps begin at valid addresses: clipped ones begin in front of the tensors.
  static bool is_addressable(const BwdProblem& problem) {
    return Variants::with_config(problem, [&](auto config) {
      return !decltype(config)::kDynamic || maps_can_be_clipped(problem);
    });
  }

  static uint64_t workspace(const BwdProblem& problem) {
    return Variants::with_config(
        problem, [&](auto config) { return BwdWorkspace<decltype(config)>(problem).end; });
  }

  // Whether dQ is summed in the workspace.
  static bool sums_grad_q(const BwdProblem& problem) {
    return Variants::with_config(
        problem, [&](auto config) { return BwdWorkspace<decltype(config)>::sums_grad_q(problem); });
  }

  static cudaError_t launch(const BwdProblem& problem, int device, cudaStream_t stream) {
    return Variants::with_config(problem, [&](auto config) {
      return launch_variant<decltype(config)>(problem, device, stream);
    });
  }

 private:
  template <unsigned kVariant>
  static constexpr KernelFacts facts(const KernelFactsMaker& maker, const char* name) {
    using C = Config<kVariant>;
    return maker.make(name, C::kThreads, C::kSharedMemory, C::kBlockQ, C::kBlockKV);
  }
  template <unsigned kVariant>
  static constexpr KernelFacts preprocess_facts(const KernelFactsMaker& maker, const char* name) {
    return maker.make(name, kPreprocessThreads, 0, Config<kVariant>::kBlockQ);
  }
  template <unsigned kVariant>
  static constexpr KernelFacts convert_facts(const KernelFactsMaker& maker, const char* name) {
    using C = Config<kVariant>;
    return maker.make(name, kConvertThreads<C>, 0, C::kBlockQ);
  }
  template <bool kBias>
  static constexpr KernelFacts dq_facts(const KernelFactsMaker& maker, const char* name) {
    using C = BwdDqConfig<Target, Dtype, kHeadDim, kHeadDimV, kBias, kBias>;
    return maker.make(name, C::kThreads, C::kSharedMemory, C::kBlockQ, C::kBlockKV);
  }

  template <class C>
  static cudaError_t launch_variant(const BwdProblem& problem, int device, cudaStream_t stream) {
    BwdArgs args{problem};
    BwdWorkspace<C>(problem).set(args);
    int64_t const query_tiles = problem.queries.tiles(problem.batch, C::kBlockQ);
    args.query_tiles = static_cast<int32_t>(query_tiles);
    TensorMapEncoder const encoder{problem, tensor_map_type<Dtype>(), C::kDynamic};
    cudaError_t error = encode_bwd_tensor_maps(args, encoder, C::kBlockQ, C::kBlockKV);
    int multiprocessors = 0;
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    // A copy, of another group. A field of its own beside the group, for both kernels, made the
    // dense kernel 3 % slower at head dim 128.
    BwdArgs key_args = args;
    std::optional<int64_t> const ctas = init_key_schedule<C>(key_args, multiprocessors);
    if (!ctas || query_tiles * problem.heads_q > INT32_MAX) return cudaErrorInvalidConfiguration;
    using DqConfig = BwdDqConfig<Target, Dtype, kHeadDim, kHeadDimV, C::kModifiers, C::kBias>;
    BwdDqArgs dq_args;
    if (!C::kGradQ)
      error = make_dq_args<DqConfig>(dq_args, args, args.counters + 1, multiprocessors);
    if (error == cudaSuccess) error = launch_preprocess<C>(args, device, stream);
    if (error == cudaSuccess) {
      LaunchShape const shape{*ctas, C::kThreads, C::kSharedMemory, true};
      error = launch_kernel<bwd_kernel<C>>(key_args, shape, device, stream);
    }
    if (error == cudaSuccess && args.splits.count > 1)
      error = launch_sum<Dtype>(args, device, stream);
    if (error != cudaSuccess) return error;
    if constexpr (C::kGradQ) {
      if (args.stores_grad_q) return error;
      return launch_kernel<bwd_convert_kernel<C>>(
          args, {query_tiles * problem.heads_q, kConvertThreads<C>, 0, true}, device, stream);
    } else {
      return launch_dq<DqConfig>(dq_args, device, stream);
    }
  }

  // Launches the preprocess kernel: delta, the LSE in base 2, zeros of the counters and of the sums
  // of dQ or, where key tiles store dQ, of those rows that no tile visits.
  template <class C>
  static cudaError_t launch_preprocess(const BwdArgs& args, int device, cudaStream_t stream) {
    PreprocessArgs preprocess{args.problem};
    preprocess.lse_log2 = const_cast<float*>(args.lse_log2);
    preprocess.delta = const_cast<float*>(args.delta);
    preprocess.grad_q_sum = args.grad_q_sum;
    preprocess.tile_elements = C::kTileElements;
    preprocess.zero_grad_q = args.stores_grad_q;
    preprocess.query_tiles = args.query_tiles;
    preprocess.aligned = true;
    preprocess.counters = args.counters;
    return launch_kernel<bwd_preprocess_kernel<Dtype, C::kBlockQ>>(
        preprocess, {int64_t{args.query_tiles} * args.problem.heads_q, kPreprocessThreads, 0, true},
        device, stream);
  }
};

}  // namespace flashvar::sm90::attention
