// The C functions of gated_delta_rule_fwd.
#include "abi/call.h"
#include "abi/gated_delta_rule_problem.h"
#include "gated_delta_rule/kernel_table.h"

namespace flashvar {

#include "gated_delta_rule_fwd_kernels.inc"  // kGatedDeltaRuleFwdKernels: generated; ends with null

namespace {

namespace gdr = gated_delta_rule;

struct GatedDeltaRuleFwd : GatedDeltaRuleOut<flashvar_gated_delta_rule_fwd_params> {
  using Kernel = GatedDeltaRuleFwdKernel;
  static constexpr const char* kName = "gated_delta_rule_fwd";
  static constexpr size_t kFirstSize = 464;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status const status = check_gated_delta_rule(p.problem, 8);
    if (status != FLASHVAR_OK) return status;
    gdr::FwdProblem const call = problem(p);
    return find_aligned_kernel(kName, kGatedDeltaRuleFwdKernels, p.problem,
                               {call.q, call.k, call.v, call.out}, kernel);
  }

  static gdr::FwdProblem problem(const Params& p) {
    auto problem = gated_delta_rule_problem<gdr::FwdProblem>(p.problem, p.out);
    problem.initial_state = view<float>(p.problem.initial_state);
    problem.final_state = view<float>(p.final_state);
    problem.workspace = p.call.workspace;
    return problem;
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(gated_delta_rule_fwd, GatedDeltaRuleFwd)
