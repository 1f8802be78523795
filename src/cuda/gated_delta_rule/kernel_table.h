// Rows of the generated kernel tables of gated_delta_rule: one type per function, named
// <Function>Kernel.
#pragma once
#include "core/launcher.h"
#include "gated_delta_rule/problem.h"

namespace flashvar {

template <class Problem>
struct GatedDeltaRuleKernel {
  unsigned dtype;  // flashvar_dtype
  int head_dim;    // largest of q and k that the kernel supports
  Launcher<Problem> launcher;
};

using GatedDeltaRuleFwdKernel = GatedDeltaRuleKernel<gated_delta_rule::FwdProblem>;
using GatedDeltaRuleBwdKernel = GatedDeltaRuleKernel<gated_delta_rule::BwdProblem>;
using GatedDeltaRuleUpdateKernel = GatedDeltaRuleKernel<gated_delta_rule::UpdateProblem>;

}  // namespace flashvar
