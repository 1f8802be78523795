// The C functions of causal_conv1d_bwd.
#include <array>

#include "abi/call.h"
#include "abi/causal_conv1d_problem.h"
#include "causal_conv1d/kernel_table.h"

namespace flashvar {

#include "causal_conv1d_bwd_kernels.inc"  // kCausalConv1dBwdKernels: generated; ends with null

namespace {

struct CausalConv1dBwd {
  using Params = flashvar_causal_conv1d_bwd_params;
  using Kernel = CausalConv1dBwdKernel;
  static constexpr const char* kName = "causal_conv1d_bwd";
  static constexpr size_t kFirstSize = 504;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status status = check_reserved("params", p.reserved);
    if (status == FLASHVAR_OK) status = check_causal_conv1d(p.problem, p.final_columns);
    if (status == FLASHVAR_OK) status = check_sequences(p.problem);
    if (status == FLASHVAR_OK) status = check_like_x("grad_x", p.grad_x, p.problem);
    if (status == FLASHVAR_OK) status = check_like_x("grad_y", p.grad_y, p.problem);
    if (status == FLASHVAR_OK) status = check_tensor("grad_weight", p.grad_weight);
    if (status == FLASHVAR_OK) status = check_tensor("grad_bias", p.grad_bias);
    if (status == FLASHVAR_OK) status = check_tensor("grad_state", p.grad_state);
    if (status == FLASHVAR_OK) status = check_tensor("grad_final", p.grad_final);
    return status == FLASHVAR_OK
               ? find_kernel_of_dtype(kName, kCausalConv1dBwdKernels, p.problem.dtype, kernel)
               : status;
  }

  // Without tokens the gradients of weights are still to be written as zeros.
  static bool is_empty(const Params& p) { return p.problem.dim == 0; }

  static std::array<Pointer, 5> required(const Params& p) {
    bool const tokens = has_tokens(p.problem);
    return {{{"x.data", p.problem.x.data, tokens},
             {"weight.data", p.problem.weight.data, tokens},
             {"grad_y.data", p.grad_y.data, tokens},
             {"grad_x.data", p.grad_x.data, tokens},
             {"grad_weight.data", p.grad_weight.data}}};
  }

  static causal_conv1d::BwdProblem problem(const Params& p) {
    causal_conv1d::BwdProblem problem{};
    translate(p.problem, problem);
    problem.grad_x = view(p.grad_x);
    problem.grad_weight = view(p.grad_weight);
    problem.grad_bias = view(p.grad_bias);
    problem.grad_state = view(p.grad_state);
    problem.grad_y = view(p.grad_y);
    problem.grad_final = view(p.grad_final);
    // Without sequences kernels count every row as sequence 0's, whose gradient does not exist.
    if (p.problem.sequences == 0) problem.grad_final.data = nullptr;
    problem.final_columns = p.final_columns;
    problem.parts = static_cast<float*>(p.call.workspace);
    return problem;
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(causal_conv1d_bwd, CausalConv1dBwd)
