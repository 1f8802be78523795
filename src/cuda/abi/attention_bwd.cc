// The C functions of the op attention_bwd: launch, workspace, explain.
#include "abi/attention_problem.h"
#include "abi/call.h"
#include "attention/kernel_table.h"

namespace flashvar {

#include "attention_bwd_kernels.inc"  // kAttentionBwdKernels: the generated table; ends with null

namespace {

constexpr size_t kFirstSize = 512;  // bytes of the parameter struct in its first version

using Params = flashvar_attention_bwd_params;

attention::BwdProblem bwd_problem(const Params& p) {
  bool const varlen_q = p.problem.cu_seqlens_q != nullptr;
  bool const varlen_k = p.problem.cu_seqlens_k != nullptr;
  return {attention_problem(p, const_cast<float*>(p.lse)),
          view(p.grad_out, varlen_q),
          view(p.grad_q, varlen_q),
          view(p.grad_k, varlen_k),
          view(p.grad_v, varlen_k),
          bias_view(p.grad_bias),
          p.grad_lse,
          static_cast<unsigned char*>(p.call.workspace),
          (p.problem.flags & FLASHVAR_DETERMINISTIC) != 0};
}

// Copies `params` to `p`, checks them, and finds the kernel that supports the call.
flashvar_status prepare(const Params* params, Params& p, const AttentionBwdKernel*& kernel) {
  flashvar_status status = read_params(params, kFirstSize, p);
  if (status == FLASHVAR_OK) status = check_attention(p.problem);
  if (status != FLASHVAR_OK) return status;
  if (p.grad_bias.data != nullptr && p.problem.bias.data == nullptr) {
    return fail(FLASHVAR_INVALID_ARGUMENT, "grad_bias is the gradient of a bias, found no bias");
  }
  return find_kernel("attention_bwd", kAttentionBwdKernels, p.problem, kernel);
}

// Without queries dK and dV are still to be written as zeros.
bool is_empty(const Params& p) { return p.problem.batch == 0; }

}  // namespace
}  // namespace flashvar

flashvar_status flashvar_attention_bwd(const flashvar_attention_bwd_params* params) {
  using namespace flashvar;
  Params p;
  const AttentionBwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK || is_empty(p)) return status;
  return launch("attention_bwd", p.call, kernel->launcher, bwd_problem(p));
}

flashvar_status flashvar_attention_bwd_workspace(const flashvar_attention_bwd_params* params,
                                                 uint64_t* size) {
  using namespace flashvar;
  Params p;
  const AttentionBwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  *size = is_empty(p) ? 0 : kernel->launcher.workspace(bwd_problem(p));
  return FLASHVAR_OK;
}

flashvar_status flashvar_attention_bwd_explain(const flashvar_attention_bwd_params* params,
                                               char* text, uint64_t size) {
  using namespace flashvar;
  Params p;
  const AttentionBwdKernel* kernel = nullptr;
  flashvar_status const status = prepare(params, p, kernel);
  if (status != FLASHVAR_OK) return status;
  Text to(text, size);
  kernel->launcher.explain(bwd_problem(p), to);
  return FLASHVAR_OK;
}
