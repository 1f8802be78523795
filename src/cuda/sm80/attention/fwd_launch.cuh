// Launches the forward: chooses one of the kernel's four variants (plain, with modifiers, split-KV,
// unaligned), grid and shared memory.
#pragma once
#include "attention/explain.h"
#include "attention/fwd_merge.cuh"
#include "attention/kernel_table.h"
#include "attention/key_splits.h"
#include "attention/pack_gqa.h"
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

  static constexpr KernelFactsList<4> facts(const char* row) {
    KernelFactsMaker const maker{row, "mma.sync", "every call"};
    return {{facts<Config<false>>(maker, "fwd_kernel"),
             facts<Config<true>>(maker, "fwd_kernel, modifiers"),
             facts<Split>(maker, "fwd_kernel, split-KV"), fwd_merge_facts(row)}};
  }

  // The facts of the kernel of launch_unaligned().
  static constexpr KernelFactsList<1> facts_unaligned(const char* row, const char* when) {
    return {{facts<Config<true>>(KernelFactsMaker{row, "mma.sync", when}, "fwd_kernel")}};
  }

  // Bytes for the results of splits. Only aligned calls have several.
  static uint64_t workspace(const FwdProblem& call) {
    FwdProblem const problem = simplified(call, kPackGqaTile);
    return KeySplitsWorkspace(problem, choose_splits(problem)).bytes;
  }

  static cudaError_t launch(const FwdProblem& call, int device, cudaStream_t stream) {
    if (!call.rows_are_aligned()) return launch_unaligned(call, device, stream);
    FwdProblem const problem = simplified(call, kPackGqaTile);
    if (problem.has_modifiers()) return launch_variant<true, true>(problem, device, stream);
    SplitChoice const choice = choose_splits(problem);
    return choice.count > 1 || needs_merge(problem)
               ? launch_split(call, problem, choice, device, stream)
               : launch_variant<false, true>(problem, device, stream);
  }

  // Supports every call, needs no workspace, and compiles one variant alone.
  static cudaError_t launch_unaligned(const FwdProblem& call, int device, cudaStream_t stream) {
    return launch_variant<true, false>(call, device, stream);
  }

 private:
  using Split = FwdConfig<Target, Dtype, kHeadDim, kHeadDimV, false, true>;
  static constexpr PackGqaTile kPackGqaTile{128, 64, 2, 64};  // at all head dims

  template <class C>
  static constexpr KernelFacts facts(const KernelFactsMaker& maker, const char* name) {
    return maker.make(name, C::kThreads, C::kSharedMemory, C::kBlockQ, C::kBlockKV);
  }

  // Kernels with modifiers have one split.
  static SplitChoice choose_splits(const FwdProblem& problem) {
    return SplitChoice::make(problem, Split::kBlockQ, Split::kBlockKV, Split::kBlocksPerSM,
                             problem.has_modifiers() ? 1 : kMaxSplits);
  }

  static cudaError_t launch_split(const FwdProblem& call, FwdProblem problem,
                                  const SplitChoice& choice, int device, cudaStream_t stream) {
    KeySplitsWorkspace(problem, choice).assign(problem, choice, problem.workspace);
    int64_t const tiles = QueryTile::tiles(problem, Split::kBlockQ);
    LaunchShape const shape{tiles * problem.heads_q * choice.count, Split::kThreads,
                            Split::kSharedMemory};
    cudaError_t const error =
        launch_kernel<fwd_kernel<Split, true>>(problem, shape, device, stream);
    return error == cudaSuccess
               ? launch_fwd_merge<Target, Dtype>(call, problem.splits, device, stream)
               : error;
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
