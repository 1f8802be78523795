// Rows of the generated kernel tables of merge_states: one type per function, named
// <Function>Kernel.
#pragma once
#include "core/launcher.h"
#include "merge_states/problem.h"

namespace flashvar {

template <class Problem>
struct MergeStatesKernel {
  unsigned dtype;  // flashvar_dtype
  Launcher<Problem> launcher;
};

using MergeStatesFwdKernel = MergeStatesKernel<merge_states::FwdProblem>;
using MergeStatesBwdKernel = MergeStatesKernel<merge_states::BwdProblem>;

}  // namespace flashvar
