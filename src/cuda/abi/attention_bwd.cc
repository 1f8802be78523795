// The C functions of attention_bwd.
#include <array>

#include "abi/attention_problem.h"
#include "abi/call.h"
#include "attention/kernel_table.h"

namespace flashvar {

#include "attention_bwd_kernels.inc"  // kAttentionBwdKernels: the generated table; ends with null

namespace {

struct AttentionBwd {
  using Params = flashvar_attention_bwd_params;
  using Kernel = AttentionBwdKernel;
  static constexpr const char* kName = "attention_bwd";
  static constexpr size_t kFirstSize = 512;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status const status = check_attention(p.problem);
    if (status != FLASHVAR_OK) return status;
    if (p.grad_bias.data != nullptr && p.problem.bias.data == nullptr) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "grad_bias is the gradient of a bias, found no bias: leave it NULL");
    }
    return find_kernel(kName, kAttentionBwdKernels, p.problem, kernel);
  }

  // Without queries dK and dV are still to be written as zeros.
  static bool is_empty(const Params& p) { return p.problem.batch == 0; }

  static std::array<Pointer, 9> required(const Params& p) {
    bool const queries = query_rows(p.problem) > 0, keys = key_rows(p.problem) > 0;
    return {{{"q.data", p.q.data, queries},
             {"k.data", p.k.data, keys},
             {"v.data", p.v.data, keys},
             {"out.data", p.out.data, queries},
             {"grad_out.data", p.grad_out.data, queries},
             {"grad_q.data", p.grad_q.data, queries},
             {"grad_k.data", p.grad_k.data, keys},
             {"grad_v.data", p.grad_v.data, keys},
             {"lse", p.lse, queries}}};
  }

  static attention::BwdProblem problem(const Params& p) {
    bool const varlen_q = p.problem.cu_seqlens_q != nullptr;
    bool const varlen_k = p.problem.cu_seqlens_k != nullptr;
    attention::BwdProblem to{};
    translate(p, const_cast<float*>(p.lse), to);
    to.grad_out = view(p.grad_out, varlen_q);
    to.grad_q = view(p.grad_q, varlen_q);
    to.grad_k = view(p.grad_k, varlen_k);
    to.grad_v = view(p.grad_v, varlen_k);
    to.grad_bias = bias_view(p.grad_bias);
    to.grad_lse = p.grad_lse;
    to.delta_out = p.problem.delta;
    to.workspace = static_cast<unsigned char*>(p.call.workspace);
    to.deterministic = (p.problem.flags & FLASHVAR_DETERMINISTIC) != 0;
    return to;
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(attention_bwd, AttentionBwd)
