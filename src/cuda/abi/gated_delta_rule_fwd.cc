// The C functions of the op gated_delta_rule_fwd.
#include <array>
#include <cmath>

#include "abi/call.h"
#include "abi/gated_delta_rule.h"
#include "gated_delta_rule/kernel_table.h"

namespace flashvar {

#include "gated_delta_rule_fwd_kernels.inc"  // kGatedDeltaRuleFwdKernels: generated; ends with null

namespace {

namespace gdr = gated_delta_rule;

struct GatedDeltaRuleFwd {
  using Params = flashvar_gated_delta_rule_fwd_params;
  using Kernel = GatedDeltaRuleFwdKernel;
  static constexpr const char* kName = "gated_delta_rule_fwd";
  static constexpr size_t kFirstSize = 464;

  static flashvar_status prepare(const Params& p, const Kernel*& kernel) {
    flashvar_status const status = check(p.problem);
    return status == FLASHVAR_OK ? find_kernel(p, kernel) : status;
  }

  static bool is_empty(const Params& p) {
    return p.problem.sequences == 0 || p.problem.heads == 0 || p.problem.head_dim_v == 0;
  }

  static std::array<Pointer, 5> required(const Params& p) {
    bool const has_rows = p.problem.seqlen > 0;
    return {{{"q.data", p.problem.q.data, has_rows},
             {"k.data", p.problem.k.data, has_rows},
             {"v.data", p.problem.v.data, has_rows},
             {"beta.data", p.problem.beta.data, has_rows},
             {"out.data", p.out.data, has_rows}}};
  }

  static gdr::FwdProblem problem(const Params& p) {
    const flashvar_gated_delta_rule_problem& given = p.problem;
    gdr::FwdProblem problem{};
    problem.sequences = given.sequences;
    bool const varlen = given.cu_seqlens != nullptr;
    auto const rows = static_cast<int32_t>(given.seqlen);
    problem.rows = {given.cu_seqlens, rows, varlen ? rows : 0};
    problem.heads_qk = given.heads_qk;
    problem.heads = given.heads;
    problem.group = given.heads / given.heads_qk;
    problem.head_dim = given.head_dim;
    problem.head_dim_v = given.head_dim_v;
    problem.scale = given.scale;
    problem.qk_l2norm = (given.flags & FLASHVAR_QK_L2NORM) != 0;
    problem.beta_sigmoid = (given.flags & FLASHVAR_BETA_SIGMOID) != 0;
    problem.beta_scale = (given.flags & FLASHVAR_NEGATIVE_EIGVAL) != 0 ? 2.f : 1.f;
    problem.q = tensor(given.q);
    problem.k = tensor(given.k);
    problem.v = tensor(given.v);
    problem.out = tensor(p.out);
    problem.g = gate(given.g);
    problem.beta = gate(given.beta);
    problem.a_log = gate(given.a_log);
    problem.dt_bias = gate(given.dt_bias);
    problem.initial_state = state(given.initial_state);
    problem.final_state = state(p.final_state);
    problem.workspace = p.call.workspace;
    return problem;
  }

 private:
  static gdr::Tensor tensor(const flashvar_tensor& t) {
    return {static_cast<uint16_t*>(t.data), t.batch_stride, t.seq_stride, t.head_stride};
  }
  static gdr::Gate gate(const flashvar_gate& g) {
    return {g.data, g.batch_stride, g.seq_stride, g.head_stride, g.dtype};
  }
  static gdr::State state(const flashvar_state& s) {
    return {s.data, s.sequence_stride, s.head_stride, s.k_stride, s.v_stride};
  }

  static flashvar_status check(const flashvar_gated_delta_rule_problem& p) {
    constexpr int64_t kMaxRows = (int64_t{1} << 30) - 1024;
    if (p.sequences < 0 || p.sequences > kMaxRows || p.seqlen < 0 || p.seqlen > kMaxRows) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "sequences and seqlen must be 0 to 2^30 - 1024, found %lld and %lld: split the "
                  "call",
                  static_cast<long long>(p.sequences), static_cast<long long>(p.seqlen));
    }
    if (p.heads_qk < 1 || p.heads < 0 || p.heads % p.heads_qk != 0) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "heads must be a multiple of heads_qk, found %d and %d", p.heads, p.heads_qk);
    }
    if (p.head_dim < 8 || p.head_dim % 8 != 0 || p.head_dim_v < 0 || p.head_dim_v % 8 != 0) {
      return fail(FLASHVAR_INVALID_ARGUMENT,
                  "head dims must be multiples of 8, found %d and %d: pad them", p.head_dim,
                  p.head_dim_v);
    }
    if (!std::isfinite(p.scale)) {
      return fail(FLASHVAR_INVALID_ARGUMENT, "scale must be finite, found %g", p.scale);
    }
    for (const flashvar_gate* gate : {&p.g, &p.beta, &p.a_log, &p.dt_bias}) {
      if (gate->dtype > FLASHVAR_FP32) {
        return fail(FLASHVAR_INVALID_ARGUMENT, "a gate's dtype must be 0 to 2, found %u",
                    gate->dtype);
      }
    }
    return FLASHVAR_OK;
  }

  static flashvar_status find_kernel(const Params& p, const Kernel*& found) {
    gdr::FwdProblem const call = problem(p);
    bool aligned = true;
    for (const gdr::Tensor* tensor : {&call.q, &call.k, &call.v, &call.out}) {
      aligned = aligned && rows_are_aligned(*tensor);
    }
    found = nullptr;
    for (const Kernel* const* row = kGatedDeltaRuleFwdKernels; *row != nullptr; ++row) {
      bool const serves =
          (*row)->dtype == p.problem.dtype && (*row)->head_dim >= p.problem.head_dim;
      if (serves && (found == nullptr || (*row)->head_dim < found->head_dim)) found = *row;
    }
    if (found != nullptr && aligned) return FLASHVAR_OK;
    return fail(FLASHVAR_NO_KERNEL,
                aligned
                    ? "this binary holds no gated_delta_rule_fwd kernel for dtype %u, head dim %d"
                    : "gated_delta_rule_fwd needs rows that start at multiples of 16 bytes "
                      "(dtype %u, head dim %d): make the tensors contiguous",
                p.problem.dtype, p.problem.head_dim);
  }
};

}  // namespace
}  // namespace flashvar

flashvar_status flashvar_gated_delta_rule_fwd(const flashvar_gated_delta_rule_fwd_params* params) {
  return flashvar::launch<flashvar::GatedDeltaRuleFwd>(params);
}

flashvar_status flashvar_gated_delta_rule_fwd_workspace(
    const flashvar_gated_delta_rule_fwd_params* params, uint64_t* size) {
  return flashvar::workspace<flashvar::GatedDeltaRuleFwd>(params, size);
}

flashvar_status flashvar_gated_delta_rule_fwd_explain(
    const flashvar_gated_delta_rule_fwd_params* params, char* text, uint64_t size) {
  return flashvar::explain<flashvar::GatedDeltaRuleFwd>(params, text, size);
}
