// The C functions of causal_conv1d_fwd.
#include <array>

#include "abi/call.h"
#include "abi/causal_conv1d_problem.h"
#include "causal_conv1d/kernel_table.h"

namespace flashvar {

#include "causal_conv1d_fwd_kernels.inc"  // kCausalConv1dFwdKernels: generated; ends with null

namespace {

struct CausalConv1dFwd {
  using Params = flashvar_causal_conv1d_fwd_params;
  using Kernel = CausalConv1dFwdKernel;
  static constexpr const char* kName = "causal_conv1d_fwd";
  static constexpr size_t kFirstSize = 384;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status status = check_reserved("params", p.reserved);
    if (status == FLASHVAR_OK) status = check_causal_conv1d(p.problem, p.final_columns);
    if (status == FLASHVAR_OK) status = check_sequences(p.problem);
    if (status == FLASHVAR_OK) status = check_like_x("y", p.y, p.problem);
    if (status == FLASHVAR_OK) status = check_tensor("residual", p.residual);
    if (status == FLASHVAR_OK) status = check_tensor("final_state", p.final_state);
    return status == FLASHVAR_OK
               ? find_kernel_of_dtype(kName, kCausalConv1dFwdKernels, p.problem.dtype, kernel)
               : status;
  }

  static bool has_states(const Params& p) {
    return p.final_columns > 0 && p.problem.sequences > 0 && p.problem.dim > 0;
  }
  static bool is_empty(const Params& p) { return !has_tokens(p.problem) && !has_states(p); }

  static std::array<Pointer, 4> required(const Params& p) {
    bool const tokens = has_tokens(p.problem);
    return {{{"x.data", p.problem.x.data, tokens},
             {"weight.data", p.problem.weight.data, tokens},
             {"y.data", p.y.data, tokens},
             {"final_state.data", p.final_state.data, has_states(p)}}};
  }

  static causal_conv1d::FwdProblem problem(const Params& p) {
    causal_conv1d::FwdProblem problem{};
    translate(p.problem, problem);
    problem.y = view(p.y);
    problem.residual = view(p.residual);
    problem.final_state = view(p.final_state);
    problem.final_columns = p.final_columns;
    return problem;
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(causal_conv1d_fwd, CausalConv1dFwd)
