// Launches the forward, on every architecture.
#pragma once
#include "core/kernel_facts.h"
#include "merge_states/fwd.cuh"
#include "merge_states/kernel_table.h"
#include "merge_states/launch.h"

namespace flashvar::merge_states {

template <class Target, class Dtype>
struct FwdLaunch {
  using Word = typename Dtype::Word;

  static constexpr MergeStatesFwdKernel row() {
    return {Dtype::kAbi, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<1> facts(const char* row) {
    return {{KernelFactsMaker{row, "simt", "every call"}.make("fwd_kernel", kThreads, 0, 0)}};
  }

 private:
  static uint64_t workspace(const FwdProblem&) { return 0; }

  static Unaligned unaligned(const FwdProblem& problem) {
    return find_unaligned(problem, sizeof(Word),
                          {named("outs", problem.outs), {"out", problem.out}});
  }

  static cudaError_t launch(const FwdProblem& problem, int device, cudaStream_t stream) {
    FwdArgs<Word> args;
    ArgsMaker const maker{problem, problem.out};
    maker.fill(args, Vec<Dtype>::kElements);
    args.out = maker.template rows<Word>(problem.out);
    args.lse = problem.lse;
    return unaligned(problem).tensor == nullptr
               ? launch_rows<fwd_kernel<Dtype, true>, Target>(args, device, stream)
               : launch_rows<fwd_kernel<Dtype, false>, Target>(args, device, stream);
  }

  static void explain_call(const FwdProblem& problem, Text& text) {
    explain(unaligned(problem), text);
  }
};

}  // namespace flashvar::merge_states
