// The op merge_states_fwd.
#include "abi/call.h"
#include "abi/merge_states_problem.h"
#include "merge_states/kernel_table.h"

namespace flashvar {

#include "merge_states_fwd_kernels.inc"  // kMergeStatesFwdKernels; its rows are other files' objects

namespace {

constexpr size_t kFirstSize = 208;  // of flashvar_merge_states_fwd_params when it was new

using Params = flashvar_merge_states_fwd_params;

merge_states::FwdProblem fwd_problem(const Params& p) {
  return {merge_states_problem(p.problem), view(p.out), p.lse};
}

// Reads and checks `params`, and finds the kernel that supports them.
flashvar_status prepare(const Params* params, Params& p, const MergeStatesFwdKernel*& kernel) {
  flashvar_status status = read_params(params, kFirstSize, p);
  if (status == FLASHVAR_OK) status = check_merge_states(p.problem);
  if (status == FLASHVAR_OK) {
    status = find_kernel("merge_states_fwd", kMergeStatesFwdKernels, p.problem, kernel);
  }
  return status;
}

}  // namespace
}  // namespace flashvar

flashvar_status flashvar_merge_states_fwd(const flashvar_merge_states_fwd_params* params) {
  using namespace flashvar;
  Params p;
  const MergeStatesFwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK || is_empty(p.problem)) return status;
  return launch("merge_states_fwd", p.call, kernel->launcher, fwd_problem(p));
}

flashvar_status flashvar_merge_states_fwd_workspace(const flashvar_merge_states_fwd_params* params,
                                                    uint64_t* size) {
  using namespace flashvar;
  Params p;
  const MergeStatesFwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  *size = kernel->launcher.workspace(fwd_problem(p));
  return FLASHVAR_OK;
}

flashvar_status flashvar_merge_states_fwd_explain(const flashvar_merge_states_fwd_params* params,
                                                  char* text, uint64_t size) {
  using namespace flashvar;
  Params p;
  const MergeStatesFwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  Text to(text, size);
  kernel->launcher.explain(fwd_problem(p), to);
  return FLASHVAR_OK;
}
