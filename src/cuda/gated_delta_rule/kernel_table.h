// Rows of the generated kernel table of gated_delta_rule_fwd.
#pragma once
#include "core/launcher.h"
#include "gated_delta_rule/problem.h"

namespace flashvar {

struct GatedDeltaRuleFwdKernel {
  unsigned dtype;  // flashvar_dtype
  int head_dim;    // largest of q and k that the kernel supports
  Launcher<gated_delta_rule::FwdProblem> launcher;
};

}  // namespace flashvar
