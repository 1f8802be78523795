// The C functions of gated_delta_rule_update.
#include "abi/call.h"
#include "abi/gated_delta_rule_problem.h"
#include "gated_delta_rule/kernel_table.h"

namespace flashvar {

// kGatedDeltaRuleUpdateKernels: generated; ends with null
#include "gated_delta_rule_update_kernels.inc"

namespace {

struct GatedDeltaRuleUpdate : GatedDeltaRuleOut<flashvar_gated_delta_rule_update_params> {
  using Kernel = GatedDeltaRuleUpdateKernel;
  static constexpr const char* kName = "gated_delta_rule_update";
  static constexpr size_t kFirstSize = 496;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status status = check_gated_delta_rule(p.problem, 1);
    if (status == FLASHVAR_OK) status = check_states(p);
    if (status != FLASHVAR_OK) return status;
    kernel = find_kernel(kGatedDeltaRuleUpdateKernels, p.problem);
    if (kernel != nullptr) return FLASHVAR_OK;
    return fail(FLASHVAR_NO_KERNEL,
                "this binary holds no gated_delta_rule_update kernel for dtype %u, head dim %d",
                p.problem.dtype, p.problem.head_dim);
  }

  static gated_delta_rule::UpdateProblem problem(const Params& p) {
    auto problem = gated_delta_rule_problem<gated_delta_rule::UpdateProblem>(p.problem, p.out);
    problem.state_dtype = p.state_dtype;
    problem.initial_state = view<void>(p.problem.initial_state);
    problem.final_state = view<void>(p.final_state);
    problem.state_indices = {p.state_indices, p.state_index_stride, p.index_bytes};
    problem.states = p.state_indices == nullptr ? p.problem.sequences : p.states;
    return problem;
  }

 private:
  static flashvar_status check_states(const Params& p) {
    if (p.state_dtype != FLASHVAR_FP32 && p.state_dtype != p.problem.dtype) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "state_dtype must be %d or the problem's, %u, found %u: convert the states",
                  FLASHVAR_FP32, p.problem.dtype, p.state_dtype);
    }
    bool const indexed = p.state_indices != nullptr;
    if (indexed ? p.index_bytes != 4 && p.index_bytes != 8 : p.index_bytes != 0) {
      return fail(
          FLASHVAR_INVALID_ARGUMENT,
          "index_bytes must be 4 or 8 with state_indices and 0 without, found %u: set it to the "
          "size of an index",
          p.index_bytes);
    }
    if (p.states < 0) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "states must be at least 0, found %lld: pass the size of the pool",
                  static_cast<long long>(p.states));
    }
    return FLASHVAR_OK;
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(gated_delta_rule_update, GatedDeltaRuleUpdate)
