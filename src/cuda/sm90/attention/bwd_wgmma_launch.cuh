// Launches the wgmma backward: its kernels in order, tensor maps, grids.
//
// Order: preprocess; dK and dV; the sum of their parts, if groups are divided; convert dQ, or the
// dQ kernel. All but the first are programmatic dependent launches.
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
#include "sm90/attention/bwd_workspace.cuh"
#include "sm90/attention/tensor_maps.h"

namespace flashvar::sm90::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct BwdWgmmaLaunch {
  template <BwdVariant kVariant>
  using Config = BwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kVariant>;
  // All variants have the tiles of this one.
  using Dense = Config<BwdVariant::kDense>;
  using Workspace = BwdWorkspace<Dense>;
  static constexpr bool kSupportsGradBias = Config<BwdVariant::kBias>::kGradBias;
  static constexpr const char* kWhen =
      "rows start on 16 bytes, so that TMA can address them; not for short sequences, nor with "
      "packed ones of fewer than 32 queries on average";
  static constexpr const char* kWhenNoGradBias =
      "rows start on 16 bytes, so that TMA can address them; not with packed sequences of fewer "
      "than 32 queries on average, the gradient of a bias";

  static constexpr KernelFactsList<4> facts(const char* row) {
    using Dq = BwdDqConfig<Target, Dtype, kHeadDim, kHeadDimV, false, false>;
    KernelFactsMaker const maker{row, "wgmma", kSupportsGradBias ? kWhen : kWhenNoGradBias};
    return {{maker.make("bwd_kernel", Dense::kThreads, Dense::kSharedMemory, Dense::kBlockQ,
                        Dense::kBlockKV),
             maker.make("bwd_preprocess_kernel", kPreprocessThreads, 0, Dense::kBlockQ),
             maker.make("bwd_sum_kernel", kSumThreads, 0, kSumRows),
             Dense::kGradQ ? maker.make("bwd_convert_kernel", kConvertThreads, 0, Dense::kBlockQ)
                           : maker.make("bwd_dq_kernel", Dq::kThreads, Dq::kSharedMemory,
                                        Dq::kBlockQ, Dq::kBlockKV)}};
  }

  // As bwd_unsupported().
  static const char* unsupported(const BwdProblem& problem) {
    return bwd_unsupported(problem, kSupportsGradBias);
  }

  // Whether the wgmma kernels support the call: TMA needs rows that start on 16 bytes.
  static bool supports(const BwdProblem& problem) {
    return unsupported(problem) == nullptr && problem.rows_are_aligned() &&
           is_addressable(problem) && tensor_map_encoder() != nullptr;
  }

  // Whether tensor maps begin at valid addresses: clipped ones begin in front of the tensors.
  static bool is_addressable(const BwdProblem& problem) {
    bool const clipped =
        takes_varlen_kernel<Dense>(problem) || problem.has_modifiers() || problem.deterministic;
    return !clipped || maps_can_be_clipped(problem);
  }

  static uint64_t workspace(const BwdProblem& problem) { return Workspace(problem).end; }

  static cudaError_t launch(const BwdProblem& problem, int device, cudaStream_t stream) {
    if (problem.modifiers.bias.data != nullptr) {
      if constexpr (Dense::kGradQ) {
        if (problem.deterministic) {
          return launch_variant<Config<BwdVariant::kNoDqBias>>(problem, device, stream);
        }
      }
      return launch_variant<Config<BwdVariant::kBias>>(problem, device, stream);
    }
    if constexpr (Dense::kGradQ) {
      if (problem.deterministic) {
        return problem.has_modifiers()
                   ? launch_variant<Config<BwdVariant::kNoDqModifiers>>(problem, device, stream)
                   : launch_variant<Config<BwdVariant::kNoDq>>(problem, device, stream);
      }
    }
    return problem.has_modifiers()
               ? launch_variant<Config<BwdVariant::kModifiers>>(problem, device, stream)
           : takes_varlen_kernel<Dense>(problem)
               ? launch_variant<Config<BwdVariant::kVarlen>>(problem, device, stream)
               : launch_variant<Dense>(problem, device, stream);
  }

 private:
  template <class C>
  static cudaError_t launch_variant(const BwdProblem& problem, int device, cudaStream_t stream) {
    BwdArgs args{problem};
    Workspace(problem).set(args, C::kGradQ);
    int64_t const query_tiles = problem.queries.tiles(problem.batch, Dense::kBlockQ);
    args.query_tiles = static_cast<int32_t>(query_tiles);
    TensorMapEncoder const encoder{problem, tensor_map_type<Dtype>(), C::kVarlen};
    cudaError_t error = encode_bwd_tensor_maps(args, encoder, Dense::kBlockQ, Dense::kBlockKV);
    int multiprocessors = 0;
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    BwdArgs key_args = args;
    std::optional<int64_t> const ctas = schedule_key_tiles<C>(key_args, multiprocessors);
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
      return launch_kernel<bwd_convert_kernel<C>>(
          args, {query_tiles * problem.heads_q, kConvertThreads, 0, true}, device, stream);
    } else {
      return launch_dq<DqConfig>(dq_args, device, multiprocessors, stream);
    }
  }

  // Launches the preprocess kernel: delta, the LSE in base 2, zeros of the counters and, where dQ
  // is summed, of its sums.
  template <class C>
  static cudaError_t launch_preprocess(const BwdArgs& args, int device, cudaStream_t stream) {
    PreprocessArgs const preprocess{args.problem,
                                    const_cast<float*>(args.lse_log2),
                                    const_cast<float*>(args.delta),
                                    args.grad_q_sum,
                                    C::kTileElements,
                                    args.query_tiles,
                                    true,
                                    args.counters};
    return launch_kernel<bwd_preprocess_kernel<Dtype, Dense::kBlockQ>>(
        preprocess, {int64_t{args.query_tiles} * args.problem.heads_q, kPreprocessThreads, 0},
        device, stream);
  }
};

}  // namespace flashvar::sm90::attention
