// The C functions of causal_conv1d_update.
#include <array>

#include "abi/call.h"
#include "abi/causal_conv1d_problem.h"
#include "causal_conv1d/kernel_table.h"

namespace flashvar {

#include "causal_conv1d_update_kernels.inc"  // kCausalConv1dUpdateKernels: generated; ends with null

namespace {

struct CausalConv1dUpdate {
  using Params = flashvar_causal_conv1d_update_params;
  using Kernel = CausalConv1dUpdateKernel;
  static constexpr const char* kName = "causal_conv1d_update";
  static constexpr size_t kFirstSize = 352;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status status = check_causal_conv1d(p.problem, 0);
    if (status == FLASHVAR_OK) status = check_states(p);
    if (status == FLASHVAR_OK) status = check_like_x("y", p.y, p.problem);
    if (status == FLASHVAR_OK) status = check_tensor("residual", p.residual);
    return status == FLASHVAR_OK
               ? find_kernel_of_dtype(kName, kCausalConv1dUpdateKernels, p.problem.dtype, kernel)
               : status;
  }

  static bool is_empty(const Params& p) { return !has_tokens(p.problem); }

  static std::array<Pointer, 4> required(const Params& p) {
    return {{{"x.data", p.problem.x.data},
             {"weight.data", p.problem.weight.data},
             {"state.data", p.problem.state.data, p.problem.sequences > 0},
             {"y.data", p.y.data}}};
  }

  static causal_conv1d::UpdateProblem problem(const Params& p) {
    causal_conv1d::UpdateProblem problem{};
    translate(p.problem, problem);
    problem.y = view(p.y);
    problem.residual = view(p.residual);
    uint32_t const flags = p.problem.flags;
    problem.state_indices = {p.state_indices, (flags & FLASHVAR_CONV1D_INT64_INDICES) != 0};
    problem.state_positions = {p.state_positions, (flags & FLASHVAR_CONV1D_INT64_POSITIONS) != 0};
    return problem;
  }

 private:
  static flashvar_status check_states(const Params& p) {
    if (p.problem.cu_seqlens != nullptr) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "cu_seqlens must be NULL in an update, found %p: pass sequences of one length",
                  p.problem.cu_seqlens);
    }
    if (p.problem.columns < p.problem.width - 1) {
      return fail(
          FLASHVAR_INVALID_ARGUMENT,
          "a state must have width - 1 columns or more, found %d of width %d: lengthen the states",
          p.problem.columns, p.problem.width);
    }
    return FLASHVAR_OK;
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(causal_conv1d_update, CausalConv1dUpdate)
