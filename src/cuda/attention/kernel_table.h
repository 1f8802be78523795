// Rows of the generated kernel tables of attention: one type per op, named <Op>Kernel.
#pragma once
#include "attention/problem.h"
#include "core/launcher.h"

namespace flashvar {

template <class Problem>
struct AttentionKernel {
  unsigned dtype;  // flashvar_dtype
  int head_dim;    // of q and k, at most
  int head_dim_v;  // of v, at most
  Launcher<Problem> launcher;
};

using AttentionFwdKernel = AttentionKernel<attention::FwdProblem>;
using AttentionBwdKernel = AttentionKernel<attention::BwdProblem>;

}  // namespace flashvar
