// Rows of the generated kernel tables of causal_conv1d: one type per function, named
// <Function>Kernel.
#pragma once
#include "causal_conv1d/problem.h"
#include "core/launcher.h"

namespace flashvar {

template <class Problem>
struct CausalConv1dKernel {
  unsigned dtype;  // flashvar_dtype of x and what is like it
  Launcher<Problem> launcher;
};

using CausalConv1dFwdKernel = CausalConv1dKernel<causal_conv1d::FwdProblem>;
using CausalConv1dBwdKernel = CausalConv1dKernel<causal_conv1d::BwdProblem>;
using CausalConv1dUpdateKernel = CausalConv1dKernel<causal_conv1d::UpdateProblem>;

}  // namespace flashvar
