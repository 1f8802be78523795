// The op merge_states_bwd.
#include "abi/call.h"
#include "abi/merge_states_problem.h"
#include "merge_states/kernel_table.h"

namespace flashvar {

#include "merge_states_bwd_kernels.inc"  // kMergeStatesBwdKernels; its rows are other files' objects

namespace {

constexpr size_t kFirstSize = 256;  // of flashvar_merge_states_bwd_params when it was new

using Params = flashvar_merge_states_bwd_params;

merge_states::BwdProblem bwd_problem(const Params& p) {
  return {merge_states_problem(p.problem), view(p.grad_out), p.grad_lse, view(p.grad_outs),
          p.grad_outs_part_stride,         p.grad_lses};
}

// Reads and checks `params`, and finds the kernel that supports them.
flashvar_status prepare(const Params* params, Params& p, const MergeStatesBwdKernel*& kernel) {
  flashvar_status status = read_params(params, kFirstSize, p);
  if (status == FLASHVAR_OK) status = check_merge_states(p.problem);
  if (status == FLASHVAR_OK) {
    status = find_kernel("merge_states_bwd", kMergeStatesBwdKernels, p.problem, kernel);
  }
  return status;
}

}  // namespace
}  // namespace flashvar

flashvar_status flashvar_merge_states_bwd(const flashvar_merge_states_bwd_params* params) {
  using namespace flashvar;
  Params p;
  const MergeStatesBwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK || is_empty(p.problem)) return status;
  return launch("merge_states_bwd", p.call, kernel->launcher, bwd_problem(p));
}

flashvar_status flashvar_merge_states_bwd_workspace(const flashvar_merge_states_bwd_params* params,
                                                    uint64_t* size) {
  using namespace flashvar;
  Params p;
  const MergeStatesBwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  *size = kernel->launcher.workspace(bwd_problem(p));
  return FLASHVAR_OK;
}

flashvar_status flashvar_merge_states_bwd_explain(const flashvar_merge_states_bwd_params* params,
                                                  char* text, uint64_t size) {
  using namespace flashvar;
  Params p;
  const MergeStatesBwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  Text to(text, size);
  kernel->launcher.explain(bwd_problem(p), to);
  return FLASHVAR_OK;
}
