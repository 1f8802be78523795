// Launches the forward: chooses one of the kernel's three variants (plain, with modifiers,
// unaligned), grid and shared memory.
#pragma once
#include "attention/explain.h"
#include "attention/kernel_table.h"
#include "core/dtype.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "sm80/attention/fwd.cuh"

namespace flashvar::sm80::attention {

template <class Target, class Dtype, int kHeadDim, int kHeadDimV = kHeadDim>
struct FwdLaunch {
  template <bool kModifiers>
  using Config = FwdConfig<Target, Dtype, kHeadDim, kHeadDimV, kModifiers>;

  static constexpr AttentionFwdKernel row() {
    return {Dtype::kAbi, kHeadDim, kHeadDimV, {&workspace, &launch, &explain_mma_sync<FwdProblem>}};
  }

  static constexpr KernelFactsList<1> facts(const char* row, const char* when = "every call") {
    using C = Config<false>;
    return {{KernelFactsMaker{row, "mma.sync", when}.make(
        "fwd_kernel", C::kThreads, C::kSharedMemory, C::kBlockQ, C::kBlockKV)}};
  }

  static uint64_t workspace(const FwdProblem&) { return 0; }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    if (!problem.rows_are_aligned()) return launch_variant<true, false>(problem, device, stream);
    return problem.has_modifiers() ? launch_variant<true, true>(problem, device, stream)
                                   : launch_variant<false, true>(problem, device, stream);
  }

  template <bool kModifiers, bool kAligned>
  static cudaError_t launch_variant(const FwdProblem& problem, int device, cudaStream_t stream) {
    using C = Config<kModifiers>;
    int64_t const tiles = QueryTile::tiles(problem, C::kBlockQ);
    LaunchShape const shape{tiles * problem.heads_q, C::kThreads, C::kSharedMemory};
    return launch_kernel<fwd_kernel<C, kAligned>>(problem, shape, device, stream);
  }
};

}  // namespace flashvar::sm80::attention
