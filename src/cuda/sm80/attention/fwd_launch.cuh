// Launches the forward: chooses one of the kernel's three variants (plain, with modifiers,
// unaligned), grid and shared memory.
#pragma once
#include "attention/explain.h"
#include "attention/fwd_merge.cuh"
#include "attention/kernel_table.h"
#include "attention/key_splits.h"
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

  // Whatever the addresses: enough for the variant with modifiers, which unaligned calls take.
  static uint64_t workspace(const FwdProblem& call) {
    FwdProblem const problem = packed(call);
    return std::max(bytes<Config<true>>(problem), bytes<Config<false>>(problem));
  }

  static cudaError_t launch(const FwdProblem& call, int device, cudaStream_t stream) {
    FwdProblem const problem = packed(call);
    if (!problem.rows_are_aligned()) return launch_variant<true, false>(problem, device, stream);
    return problem.has_modifiers() ? launch_variant<true, true>(problem, device, stream)
                                   : launch_variant<false, true>(problem, device, stream);
  }

  // As FwdVariants::time() of sm90: these kernels take twice as long on 9.0.
  static int64_t time(const FwdProblem& problem) {
    return problem.has_modifiers() ? time<Config<true>>(problem) : time<Config<false>>(problem);
  }

 private:
  template <class C>
  static int64_t time(const FwdProblem& problem) {
    int64_t const block = divide_keys<C>(problem).time * C::kBlockQ * C::kBlockKV;
    return 200 * block * C::kBlocksPerSM;
  }

  template <class C>
  static KeyDivision divide_keys(const FwdProblem& problem) {
    return KeyDivision::make(problem, C::kBlockQ, C::kBlockKV, C::kBlocksPerSM);
  }

  template <class C>
  static uint64_t bytes(const FwdProblem& problem) {
    return KeySplitsWorkspace(problem, divide_keys<C>(problem)).bytes;
  }

  template <bool kModifiers, bool kAligned>
  static cudaError_t launch_variant(FwdProblem problem, int device, cudaStream_t stream) {
    using C = Config<kModifiers>;
    KeyDivision const division = divide_keys<C>(problem);
    problem.splits = KeySplitsWorkspace(problem, division)
                         .splits(division, problem.workspace, problem.head_dim_v);
    int64_t const tiles = QueryTile::tiles(problem, C::kBlockQ);
    LaunchShape const shape{tiles * problem.heads_q * division.count, C::kThreads,
                            C::kSharedMemory};
    cudaError_t const error =
        launch_kernel<fwd_kernel<C, kAligned>>(problem, shape, device, stream);
    if (error != cudaSuccess || problem.splits.out == nullptr) return error;
    return launch_fwd_merge<Target, Dtype>(problem, device, stream);
  }
};

}  // namespace flashvar::sm80::attention
