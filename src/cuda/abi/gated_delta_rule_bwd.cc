// The C functions of gated_delta_rule_bwd.
#include <array>

#include "abi/call.h"
#include "abi/gated_delta_rule_problem.h"
#include "gated_delta_rule/kernel_table.h"

namespace flashvar {

#include "gated_delta_rule_bwd_kernels.inc"  // kGatedDeltaRuleBwdKernels: generated; ends with null

namespace {

namespace gdr = gated_delta_rule;

struct GatedDeltaRuleBwd {
  using Params = flashvar_gated_delta_rule_bwd_params;
  using Kernel = GatedDeltaRuleBwdKernel;
  static constexpr const char* kName = "gated_delta_rule_bwd";
  static constexpr size_t kFirstSize = 760;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status status = check_gated_delta_rule(p.problem, 8);
    if (status == FLASHVAR_OK) status = check_gates(p);
    if (status != FLASHVAR_OK) return status;
    gdr::BwdProblem const call = problem(p);
    return find_aligned_kernel(
        kName, kGatedDeltaRuleBwdKernels, p.problem,
        {call.q, call.k, call.v, call.grad_out, call.grad_q, call.grad_k, call.grad_v}, kernel);
  }

  static bool is_empty(const Params& p) {
    return p.problem.sequences == 0 || p.problem.heads == 0 || p.problem.head_dim_v == 0;
  }

  static std::array<Pointer, 9> required(const Params& p) {
    bool const has_rows = p.problem.seqlen > 0;
    return {{{"q.data", p.problem.q.data, has_rows},
             {"k.data", p.problem.k.data, has_rows},
             {"v.data", p.problem.v.data, has_rows},
             {"beta.data", p.problem.beta.data, has_rows},
             {"grad_out.data", p.grad_out.data, has_rows},
             {"grad_q.data", p.grad_q.data, has_rows},
             {"grad_k.data", p.grad_k.data, has_rows},
             {"grad_v.data", p.grad_v.data, has_rows},
             {"grad_beta.data", p.grad_beta.data, has_rows}}};
  }

  static gdr::BwdProblem problem(const Params& p) {
    auto problem = gated_delta_rule_problem<gdr::BwdProblem>(p.problem, {});
    problem.initial_state = view<float>(p.problem.initial_state);
    problem.workspace = p.call.workspace;
    problem.grad_out = gated_delta_rule_tensor(p.grad_out);
    problem.grad_final_state = view<float>(p.grad_final_state);
    problem.grad_q = gated_delta_rule_tensor(p.grad_q);
    problem.grad_k = gated_delta_rule_tensor(p.grad_k);
    problem.grad_v = gated_delta_rule_tensor(p.grad_v);
    problem.grad_g = grad_gate(p.grad_g);
    problem.grad_beta = grad_gate(p.grad_beta);
    problem.grad_a_log = grad_gate(p.grad_a_log);
    problem.grad_dt_bias = grad_gate(p.grad_dt_bias);
    problem.grad_initial_state = view<float>(p.grad_initial_state);
    return problem;
  }

 private:
  static gdr::GradGate grad_gate(const flashvar_grad_gate& g) {
    return {g.data, g.batch_stride, g.seq_stride, g.head_stride, g.dtype};
  }

  static flashvar_status check_gates(const Params& p) {
    struct Pair {
      const char* grad_name;
      const char* name;
      const flashvar_grad_gate& grad;
      const flashvar_gate& gate;
    };
    const flashvar_gated_delta_rule_problem& given = p.problem;
    for (const Pair& pair : {Pair{"grad_g", "g", p.grad_g, given.g},
                             Pair{"grad_beta", "beta", p.grad_beta, given.beta},
                             Pair{"grad_a_log", "a_log", p.grad_a_log, given.a_log},
                             Pair{"grad_dt_bias", "dt_bias", p.grad_dt_bias, given.dt_bias}}) {
      flashvar_status const status = check_gate(pair.grad_name, pair.grad);
      if (status != FLASHVAR_OK) return status;
      if (pair.grad.data != nullptr && pair.gate.data == nullptr && given.seqlen > 0) {
        return fail(FLASHVAR_INVALID_ARGUMENT,
                    "%s is the gradient of %s, found no %s: leave it NULL", pair.grad_name,
                    pair.name, pair.name);
      }
    }
    return FLASHVAR_OK;
  }
};

}  // namespace
}  // namespace flashvar

FLASHVAR_DEFINE_C_FUNCTIONS(gated_delta_rule_bwd, GatedDeltaRuleBwd)
