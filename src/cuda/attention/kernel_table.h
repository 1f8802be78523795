// Row types of the generated kernel tables of attention, one per function, named <Function>Kernel.
#pragma once
#include "attention/problem.h"
#include "core/launcher.h"

namespace flashvar {

template <class Problem>
struct AttentionKernel {
  unsigned dtype;  // flashvar_dtype
  int head_dim;    // largest of q and k that the kernel supports
  int head_dim_v;  // largest of v
  Launcher<Problem> launcher;
};

using AttentionFwdKernel = AttentionKernel<attention::FwdProblem>;
using AttentionBwdKernel = AttentionKernel<attention::BwdProblem>;

}  // namespace flashvar
