// The C functions of attention_fwd.
#include <array>

#include "abi/attention_problem.h"
#include "abi/call.h"
#include "attention/kernel_table.h"

namespace flashvar {

#include "attention_fwd_kernels.inc"  // kAttentionFwdKernels: the generated table; ends with null

namespace {

struct AttentionFwd {
  using Params = flashvar_attention_fwd_params;
  using Kernel = AttentionFwdKernel;
  static constexpr const char* kName = "attention_fwd";
  static constexpr size_t kFirstSize = 344;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status const status = check_attention(p.problem);
    if (status != FLASHVAR_OK) return status;
    if (p.problem.delta != nullptr) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "delta is written by the backward, found its address in a forward: pass NULL");
    }
    return find_kernel(kName, kAttentionFwdKernels, p.problem, kernel);
  }

  static bool is_empty(const Params& p) {
    return p.problem.batch == 0 || query_rows(p.problem) == 0;
  }

  static std::array<Pointer, 4> required(const Params& p) {
    bool const keys = key_rows(p.problem) > 0;
    return {{{"q.data", p.q.data},
             {"k.data", p.k.data, keys},
             {"v.data", p.v.data, keys},
             {"out.data", p.out.data}}};
  }

  static attention::FwdProblem problem(const Params& p) {
    attention::FwdProblem to{};
    translate(p, p.lse, to);
    to.workspace = static_cast<unsigned char*>(p.call.workspace);
    to.sinks = {p.problem.sinks, p.problem.sinks_dtype};
    return to;
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(attention_fwd, AttentionFwd)
