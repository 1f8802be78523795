// Launches the wgmma forward: encodes tensor maps, sizes the grid.
#pragma once
#include <algorithm>
#include <type_traits>

#include "attention/fwd_merge.cuh"
#include "attention/kernel_table.h"
#include "attention/key_splits.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/tensor_map.h"
#include "sm90/attention/fwd.cuh"
#include "sm90/attention/fwd_few_launch.cuh"
#include "sm90/attention/fwd_variants.h"
#include "sm90/attention/tensor_maps.h"

namespace flashvar::sm90::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct FwdWgmmaLaunch {
  using Variants = FwdVariants<Target, Dtype, kHeadDim, kHeadDimV>;
  template <FwdVariant kVariant>
  using Config = typename Variants::template Config<kVariant>;

  // One record per variant, that of a plain call first, and one of the kernel that merges splits.
  static constexpr auto facts(const char* row) {
    KernelFactsList<7> const always{
        {facts<FwdVariant::kGeneral>(row, "fwd_kernel"),
         facts<FwdVariant::kModifiers>(row, "fwd_kernel, modifiers"),
         facts<FwdVariant::kSplit>(row, "fwd_kernel, split-KV"),
         few_facts<8>(row, "fwd_few_kernel, 8 rows"), few_facts<16>(row, "fwd_few_kernel, 16 rows"),
         few_facts<32>(row, "fwd_few_kernel, 32 rows"), fwd_merge_facts(row)}};
    if constexpr (Variants::kHasSmaller) {
      auto const smaller = join(
          always, KernelFactsList<5>{
                      {facts<FwdVariant::kMedium>(row, "fwd_kernel, medium tiles"),
                       facts<FwdVariant::kSmall>(row, "fwd_kernel, small tiles"),
                       facts<FwdVariant::kSmallWide>(row, "fwd_kernel, small, 80 keys"),
                       facts<FwdVariant::kSmallSplit>(row, "fwd_kernel, small, split-KV"),
                       facts<FwdVariant::kSmallModifiers>(row, "fwd_kernel, small, modifiers")}});
      if constexpr (Variants::kHasLines) {
        return join(smaller, KernelFactsList<1>{
                                 {facts<FwdVariant::kLines>(row, "fwd_kernel, rows on lines")}});
      } else {
        return smaller;
      }
    } else {
      return always;
    }
  }

  // Whether the wgmma kernels support the call: TMA requires rows that start at multiples of 16
  // bytes.
  static bool supports(const FwdProblem& problem) {
    return problem.rows_are_aligned() && tensor_map_encoder() != nullptr;
  }

  // For the counter of the dynamic schedule, and for the results of splits. The same for all
  // addresses and all strides of k and v, whichever kernel they lead to (with_config).
  static uint64_t workspace(const FwdProblem& call) {
    FwdProblem const problem = Variants::simplified(call);
    return Variants::with_config(problem, [&](auto, const auto& splits) {
      if constexpr (is_few<decltype(splits)>) {
        return counter_bytes(problem) + splits.workspace(problem);
      } else {
        return counter_bytes(problem) + KeySplitsWorkspace(problem, splits).bytes;
      }
    });
  }

  static cudaError_t launch(const FwdProblem& call, int device, cudaStream_t stream) {
    FwdProblem const problem = Variants::simplified(call);
    return Variants::with_config(problem, [&](auto config, const auto& splits) {
      if constexpr (is_few<decltype(splits)>) {
        FwdProblem split = problem;
        splits.assign(split, problem.workspace + counter_bytes(problem));
        return launch_fwd_few<Target, decltype(config)>(call, split, splits, device, stream);
      } else {
        return launch_variant<decltype(config)>(call, problem, splits, device, stream);
      }
    });
  }

 private:
  static constexpr const char* kNeeds = "rows start on 16 bytes, so that TMA can address them";

  // Whether with_config() has chosen the kernel for few rows.
  template <class Splits>
  static constexpr bool is_few = std::is_same_v<std::decay_t<Splits>, FewSplits>;

  static uint64_t counter_bytes(const FwdProblem& problem) {
    return problem.queries.offsets == nullptr ? 0 : 256;
  }

  template <FwdVariant kVariant>
  static constexpr KernelFacts facts(const char* row, const char* kernel) {
    using C = Config<kVariant>;
    KernelFactsMaker const maker{row, "wgmma", kNeeds};
    return maker.make(kernel, C::kThreads, C::kSharedMemory, C::kBlockQ, C::kBlockKV);
  }

  template <int kRows>
  static constexpr KernelFacts few_facts(const char* row, const char* kernel) {
    using C = typename Variants::template Few<kRows>;
    KernelFactsMaker const maker{row, "wgmma", kNeeds};
    return maker.make(kernel, C::kThreads, C::shared_memory(C::kMaxStages), C::kBlockQ,
                      C::kBlockKV);
  }

  template <class C>
  static cudaError_t launch_variant(const FwdProblem& call, FwdProblem problem,
                                    const SplitChoice& splits, int device, cudaStream_t stream) {
    KeySplitsWorkspace(problem, splits)
        .assign(problem, splits, problem.workspace + counter_bytes(problem));
    FwdArgs args;
    args.problem = problem;
    if (C::kShiftsK) args.shift_k = LineShift::make(problem.k, problem.head_dim, C::kHeadDim);
    if (C::kShiftsV) args.shift_v = LineShift::make(problem.v, problem.head_dim_v, C::kHeadDimV);
    TensorMapEncoder const encoder{problem, tensor_map_type<Dtype>()};
    cudaError_t error = C::kSplits
                            ? encoder.members(args.q, problem.q, problem.head_dim, C::kBlockQ)
                            : encoder.queries(args.q, problem.q, problem.head_dim, C::kBlockQ);
    if (error == cudaSuccess) {
      error = encoder.keys(args.k, problem.k, problem.head_dim, C::kBlockKV);
    }
    if (error == cudaSuccess) {
      error = encoder.keys(args.v, problem.v, problem.head_dim_v, C::kBlockKV);
    }
    int multiprocessors = 0;
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (error != cudaSuccess) return error;
    if (!args.init(problem, C::kBlockQ, multiprocessors, C::kBlocksPerSM,
                   reinterpret_cast<uint32_t*>(problem.workspace))) {
      return cudaErrorInvalidConfiguration;
    }
    if (args.counter != nullptr) {
      error = cudaMemsetAsync(args.counter, 0, sizeof(uint32_t), stream);
    }
    if (error != cudaSuccess) return error;
    // No programmatic launch if (1) the memset precedes: it is no kernel; or (2) several CTAs fit
    // on an SM and the grid does not fill the device: CTAs that start early would pile up on the
    // first SMs that become free, and leave the others idle.
    bool const fills = C::kBlocksPerSM == 1 ||
                       args.ctas == static_cast<uint32_t>(multiprocessors * C::kBlocksPerSM);
    LaunchShape const shape{args.ctas, C::kThreads, C::kSharedMemory,
                            fills && args.counter == nullptr};
    error = launch_kernel<fwd_kernel<C>>(args, shape, device, stream);
    if (problem.splits.out != nullptr && error == cudaSuccess) {
      error = launch_fwd_merge<Target, Dtype>(call, problem.splits, device, stream);
    }
    return error;
  }
};

}  // namespace flashvar::sm90::attention
