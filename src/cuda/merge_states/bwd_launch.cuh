// Launches the backward, on every architecture.
#pragma once
#include "core/kernel_facts.h"
#include "merge_states/bwd.cuh"
#include "merge_states/kernel_table.h"
#include "merge_states/launch.h"

namespace flashvar::merge_states {

template <class Target, class Dtype>
struct BwdLaunch {
  using Word = typename Dtype::Word;

  static constexpr MergeStatesBwdKernel row() {
    return {Dtype::kAbi, {&workspace, &launch, &explain_call}};
  }

  static constexpr KernelFactsList<1> facts(const char* row) {
    return {{KernelFactsMaker{row, "simt", "every call"}.make("bwd_kernel", kThreads, 0, 0)}};
  }

 private:
  static uint64_t workspace(const BwdProblem&) { return 0; }

  static Unaligned unaligned(const BwdProblem& problem) {
    return find_unaligned(problem, sizeof(Word),
                          {named("outs", problem.outs),
                           {"grad_out", problem.grad_out},
                           {"grad_outs", problem.grad_outs, problem.grad_outs_stride}});
  }

  static cudaError_t launch(const BwdProblem& problem, int device, cudaStream_t stream) {
    BwdArgs<Word> args;
    ArgsMaker const maker{problem,
                          problem.grad_outs.data != nullptr ? problem.grad_outs : problem.grad_out};
    maker.fill(args, Vec<Dtype>::kElements);
    args.grad_out = maker.template rows<const Word>(problem.grad_out);
    args.grad_outs = maker.template rows<Word>(problem.grad_outs);
    args.grad_outs_stride = problem.grad_outs_stride;
    args.skipped_outs = problem.skipped_outs;
    args.grad_lse = problem.grad_lse;
    args.grad_lses = problem.grad_lses;
    return unaligned(problem).tensor == nullptr
               ? launch_rows<bwd_kernel<Dtype, true>, Target>(args, device, stream)
               : launch_rows<bwd_kernel<Dtype, false>, Target>(args, device, stream);
  }

  static void explain_call(const BwdProblem& problem, Text& text) {
    explain(unaligned(problem), text);
  }
};

}  // namespace flashvar::merge_states
