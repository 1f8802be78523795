// Checks the parameters that all functions of gated_delta_rule share, and converts them to
// gated_delta_rule::Problem.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "abi/call.h"
#include "abi/error.h"
#include "abi/gated_delta_rule.h"
#include "gated_delta_rule/problem.h"

namespace flashvar {

// The bits of `flags` that gated_delta_rule.h defines.
inline constexpr uint32_t kGatedDeltaRuleFlags =
    FLASHVAR_QK_L2NORM | FLASHVAR_BETA_SIGMOID | FLASHVAR_NEGATIVE_EIGVAL;

// `Gate`: flashvar_gate or flashvar_grad_gate.
template <class Gate>
flashvar_status check_gate(const char* name, const Gate& gate) {
  if (gate.dtype > FLASHVAR_FP32) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "%s.dtype must be 0 to 2, found %u: set it to a flashvar_dtype", name, gate.dtype);
  }
  return check_reserved(name, gate.reserved);
}

// `step`: what head dims must be multiples of.
inline flashvar_status check_gated_delta_rule(const flashvar_gated_delta_rule_problem& p,
                                              int32_t step) {
  flashvar_status status = check_reserved("problem", p.reserved);
  if (status == FLASHVAR_OK) status = check_flags(p.flags, kGatedDeltaRuleFlags);
  if (status != FLASHVAR_OK) return status;
  // As attention's kMaxSeqlen: kernels compute with 32-bit rows, also past the end of a chunk.
  constexpr int64_t kMaxRows = (int64_t{1} << 30) - 1024;
  if (p.sequences < 0 || p.sequences > kMaxRows || p.seqlen < 0 || p.seqlen > kMaxRows) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "sequences and seqlen must be 0 to 2^30 - 1024, found %lld and %lld: split the "
                "call",
                static_cast<long long>(p.sequences), static_cast<long long>(p.seqlen));
  }
  if (p.heads_qk < 1 || p.heads < 0 || p.heads % p.heads_qk != 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "heads must be a multiple of heads_qk, found %d and %d: repeat heads of v", p.heads,
                p.heads_qk);
  }
  if (p.head_dim < 1 || p.head_dim % step != 0 || p.head_dim_v < 0 || p.head_dim_v % step != 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "head dims must be at least 1 and multiples of %d, found %d and %d: pad them", step,
                p.head_dim, p.head_dim_v);
  }
  if (!std::isfinite(p.scale)) {
    return fail(FLASHVAR_INVALID_ARGUMENT, "scale must be finite, found %g: pass a finite one",
                p.scale);
  }
  if (p.dt_bias.data != nullptr && p.a_log.data == nullptr) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "dt_bias must be NULL without a_log, found its address: pass a_log too, or add "
                "dt_bias to g");
  }
  status = check_gate("g", p.g);
  if (status == FLASHVAR_OK) status = check_gate("beta", p.beta);
  if (status == FLASHVAR_OK) status = check_gate("a_log", p.a_log);
  if (status == FLASHVAR_OK) status = check_gate("dt_bias", p.dt_bias);
  return status;
}

template <class Element>
gated_delta_rule::StateView<Element> view(const flashvar_state& s) {
  return {static_cast<Element*>(s.data), s.sequence_stride, s.head_stride, s.k_stride, s.v_stride};
}

inline gated_delta_rule::Tensor gated_delta_rule_tensor(const flashvar_tensor& t) {
  return {static_cast<uint16_t*>(t.data), t.batch_stride, t.seq_stride, t.head_stride};
}

// A function's problem, with the fields of gated_delta_rule::Problem set.
template <class Problem>
Problem gated_delta_rule_problem(const flashvar_gated_delta_rule_problem& p,
                                 const flashvar_tensor& out) {
  auto const gate = [](const flashvar_gate& g) {
    return gated_delta_rule::Gate{g.data, g.batch_stride, g.seq_stride, g.head_stride, g.dtype};
  };
  auto const rows = static_cast<int32_t>(p.seqlen);
  Problem problem{};
  problem.sequences = p.sequences;
  problem.rows = {p.cu_seqlens, rows, p.cu_seqlens != nullptr ? rows : 0};
  problem.heads_qk = p.heads_qk;
  problem.heads = p.heads;
  problem.group = p.heads / p.heads_qk;
  problem.head_dim = p.head_dim;
  problem.head_dim_v = p.head_dim_v;
  problem.scale = p.scale;
  problem.qk_l2norm = (p.flags & FLASHVAR_QK_L2NORM) != 0;
  problem.beta_sigmoid = (p.flags & FLASHVAR_BETA_SIGMOID) != 0;
  problem.beta_scale = (p.flags & FLASHVAR_NEGATIVE_EIGVAL) != 0 ? 2.f : 1.f;
  problem.q = gated_delta_rule_tensor(p.q);
  problem.k = gated_delta_rule_tensor(p.k);
  problem.v = gated_delta_rule_tensor(p.v);
  problem.out = gated_delta_rule_tensor(out);
  problem.g = gate(p.g);
  problem.beta = gate(p.beta);
  problem.a_log = gate(p.a_log);
  problem.dt_bias = gate(p.dt_bias);
  return problem;
}

// Members of Function (call.h) that the functions which write `out` share.
template <class Params_>
struct GatedDeltaRuleOut {
  using Params = Params_;

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
};

// The kernel with the smallest head dim that is at least the problem's, or null. `table` ends with
// null.
template <class Kernel>
const Kernel* find_kernel(const Kernel* const* table, const flashvar_gated_delta_rule_problem& p) {
  const Kernel* found = nullptr;
  for (const Kernel* const* row = table; *row != nullptr; ++row) {
    bool const serves = (*row)->dtype == p.dtype && (*row)->head_dim >= p.head_dim;
    if (serves && (found == nullptr || (*row)->head_dim < found->head_dim)) found = *row;
  }
  return found;
}

// As find_kernel(), for kernels that need aligned rows of these tensors.
template <class Kernel>
flashvar_status find_aligned_kernel(const char* function, const Kernel* const* table,
                                    const flashvar_gated_delta_rule_problem& p,
                                    std::initializer_list<gated_delta_rule::Tensor> tensors,
                                    const Kernel*& found) {
  found = find_kernel(table, p);
  if (found == nullptr) {
    return fail(FLASHVAR_NO_KERNEL, "this binary holds no %s kernel for dtype %u, head dim %d",
                function, p.dtype, p.head_dim);
  }
  for (const gated_delta_rule::Tensor& tensor : tensors) {
    if (rows_are_aligned(tensor)) continue;
    return fail(FLASHVAR_NO_KERNEL,
                "%s needs rows that start at multiples of 16 bytes (dtype %u, head dim %d): make "
                "the tensors contiguous",
                function, p.dtype, p.head_dim);
  }
  return FLASHVAR_OK;
}

}  // namespace flashvar
