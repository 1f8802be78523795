// The C functions of the op attention_fwd: launch, workspace, explain.
#include "abi/attention_problem.h"
#include "abi/call.h"
#include "attention/kernel_table.h"

namespace flashvar {

#include "attention_fwd_kernels.inc"  // kAttentionFwdKernels: the generated table; ends with null

namespace {

constexpr size_t kFirstSize = 344;  // bytes of the parameter struct in its first version

using Params = flashvar_attention_fwd_params;

attention::FwdProblem fwd_problem(const Params& p) {
  return {attention_problem(p, p.lse), static_cast<unsigned char*>(p.call.workspace)};
}

// Copies `params` to `p`, checks them, and finds the kernel that supports the call.
flashvar_status prepare(const Params* params, Params& p, const AttentionFwdKernel*& kernel) {
  flashvar_status status = read_params(params, kFirstSize, p);
  if (status == FLASHVAR_OK) status = check_attention(p.problem);
  if (status == FLASHVAR_OK) {
    status = find_kernel("attention_fwd", kAttentionFwdKernels, p.problem, kernel);
  }
  return status;
}

bool is_empty(const Params& p) { return p.problem.batch == 0 || query_rows(p.problem) == 0; }

}  // namespace
}  // namespace flashvar

flashvar_status flashvar_attention_fwd(const flashvar_attention_fwd_params* params) {
  using namespace flashvar;
  Params p;
  const AttentionFwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK || is_empty(p)) return status;
  return launch("attention_fwd", p.call, kernel->launcher, fwd_problem(p));
}

flashvar_status flashvar_attention_fwd_workspace(const flashvar_attention_fwd_params* params,
                                                 uint64_t* size) {
  using namespace flashvar;
  Params p;
  const AttentionFwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  *size = is_empty(p) ? 0 : kernel->launcher.workspace(fwd_problem(p));
  return FLASHVAR_OK;
}

flashvar_status flashvar_attention_fwd_explain(const flashvar_attention_fwd_params* params,
                                               char* text, uint64_t size) {
  using namespace flashvar;
  Params p;
  const AttentionFwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  Text to(text, size);
  kernel->launcher.explain(fwd_problem(p), to);
  return FLASHVAR_OK;
}
