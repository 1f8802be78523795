// Launches the wgmma forward: chooses the variant, encodes tensor maps, sizes the grid.
#pragma once
#include <algorithm>

#include "attention/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/tensor_map.h"
#include "sm90/attention/fwd.cuh"
#include "sm90/attention/tensor_maps.h"

namespace flashvar::sm90::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct FwdWgmmaLaunch {
  template <FwdVariant kVariant>
  using Config = FwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kVariant>;
  using General = Config<FwdVariant::kGeneral>;
  using Short = Config<FwdVariant::kShort>;
  static constexpr bool kHasShort = Short::kTile.variant == FwdVariant::kShort;

  // One record per variant, that of a plain call first.
  static constexpr auto facts(const char* row) {
    KernelFactsList<2> const always{
        {facts<General>(row, "fwd_kernel"),
         facts<Config<FwdVariant::kModifiers>>(row, "fwd_kernel, modifiers")}};
    if constexpr (kHasShort) {
      return join(always,
                  KernelFactsList<1>{{facts<Short>(row, "fwd_kernel, few keys or a mask")}});
    } else {
      return always;
    }
  }

  // Whether the wgmma kernels support the call: TMA requires rows that start at multiples of 16
  // bytes.
  static bool supports(const FwdProblem& problem) {
    return problem.rows_are_aligned() && tensor_map_encoder() != nullptr;
  }

  // Bytes for the counter of the dynamic schedule.
  static uint64_t workspace(const FwdProblem& problem) {
    return problem.queries.offsets == nullptr ? 0 : 256;
  }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    if (problem.has_modifiers()) {
      return launch_variant<Config<FwdVariant::kModifiers>>(problem, device, stream);
    }
    if constexpr (kHasShort) {
      if (problem.keys.seqlen <= Short::kTile.few_keys || problem.window_left != kUnbounded ||
          (Short::kTile.causal && problem.window_right != kUnbounded)) {
        return launch_variant<Short>(problem, device, stream);
      }
    }
    return launch_variant<General>(problem, device, stream);
  }

 private:
  template <class C>
  static constexpr KernelFacts facts(const char* row, const char* kernel) {
    KernelFactsMaker const maker{row, "wgmma",
                                 "rows start on 16 bytes, so that TMA can address them"};
    return maker.make(kernel, C::kThreads, C::kSharedMemory, C::kBlockQ, C::kBlockKV);
  }

  template <class C>
  static cudaError_t launch_variant(const FwdProblem& problem, int device, cudaStream_t stream) {
    FwdArgs args;
    args.problem = problem;
    TensorMapEncoder const encoder{problem, tensor_map_type<Dtype>()};
    cudaError_t error = encoder.queries(args.q, problem.q, problem.head_dim, C::kBlockQ);
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
    if (!args.init(problem, C::kBlockQ, multiprocessors,
                   reinterpret_cast<uint32_t*>(problem.workspace))) {
      return cudaErrorInvalidConfiguration;
    }
    if (args.counter != nullptr) {
      error = cudaMemsetAsync(args.counter, 0, sizeof(uint32_t), stream);
    }
    if (error != cudaSuccess) return error;
    LaunchShape const shape{std::min<int64_t>(args.work_units, multiprocessors), C::kThreads,
                            C::kSharedMemory};
    return launch_kernel<fwd_kernel<C>>(args, shape, device, stream);
  }
};

}  // namespace flashvar::sm90::attention
