// The layout of the parameters of the gated delta rule, frozen (see layout_check.cc).
#include <cstddef>

#include "abi/gated_delta_rule.h"

using Gate = flashvar_gate;
static_assert(sizeof(Gate) == 40);
static_assert(offsetof(Gate, data) == 0);
static_assert(offsetof(Gate, batch_stride) == 8);
static_assert(offsetof(Gate, seq_stride) == 16);
static_assert(offsetof(Gate, head_stride) == 24);
static_assert(offsetof(Gate, dtype) == 32);
static_assert(offsetof(Gate, reserved) == 36);

using Problem = flashvar_gated_delta_rule_problem;
static_assert(sizeof(Problem) == 352);
static_assert(offsetof(Problem, sequences) == 0);
static_assert(offsetof(Problem, seqlen) == 8);
static_assert(offsetof(Problem, heads_qk) == 16);
static_assert(offsetof(Problem, heads) == 20);
static_assert(offsetof(Problem, head_dim) == 24);
static_assert(offsetof(Problem, head_dim_v) == 28);
static_assert(offsetof(Problem, dtype) == 32);
static_assert(offsetof(Problem, flags) == 36);
static_assert(offsetof(Problem, scale) == 40);
static_assert(offsetof(Problem, reserved) == 44);
static_assert(offsetof(Problem, cu_seqlens) == 48);
static_assert(offsetof(Problem, q) == 56);
static_assert(offsetof(Problem, k) == 88);
static_assert(offsetof(Problem, v) == 120);
static_assert(offsetof(Problem, g) == 152);
static_assert(offsetof(Problem, beta) == 192);
static_assert(offsetof(Problem, a_log) == 232);
static_assert(offsetof(Problem, dt_bias) == 272);
static_assert(offsetof(Problem, initial_state) == 312);

using Fwd = flashvar_gated_delta_rule_fwd_params;
static_assert(sizeof(Fwd) == 464);
static_assert(offsetof(Fwd, call) == 0);
static_assert(offsetof(Fwd, out) == 40);
static_assert(offsetof(Fwd, final_state) == 72);
static_assert(offsetof(Fwd, problem) == 112);

using Update = flashvar_gated_delta_rule_update_params;
static_assert(sizeof(Update) == 496);
static_assert(offsetof(Update, call) == 0);
static_assert(offsetof(Update, out) == 40);
static_assert(offsetof(Update, final_state) == 72);
static_assert(offsetof(Update, problem) == 112);
static_assert(offsetof(Update, state_indices) == 464);
static_assert(offsetof(Update, state_index_stride) == 472);
static_assert(offsetof(Update, states) == 480);
static_assert(offsetof(Update, state_dtype) == 488);
static_assert(offsetof(Update, index_bytes) == 492);

using GradGate = flashvar_grad_gate;
static_assert(sizeof(GradGate) == 40);
static_assert(offsetof(GradGate, data) == 0);
static_assert(offsetof(GradGate, batch_stride) == 8);
static_assert(offsetof(GradGate, seq_stride) == 16);
static_assert(offsetof(GradGate, head_stride) == 24);
static_assert(offsetof(GradGate, dtype) == 32);
static_assert(offsetof(GradGate, reserved) == 36);

using Bwd = flashvar_gated_delta_rule_bwd_params;
static_assert(sizeof(Bwd) == 760);
static_assert(offsetof(Bwd, call) == 0);
static_assert(offsetof(Bwd, grad_out) == 40);
static_assert(offsetof(Bwd, grad_final_state) == 72);
static_assert(offsetof(Bwd, grad_q) == 112);
static_assert(offsetof(Bwd, grad_k) == 144);
static_assert(offsetof(Bwd, grad_v) == 176);
static_assert(offsetof(Bwd, grad_g) == 208);
static_assert(offsetof(Bwd, grad_beta) == 248);
static_assert(offsetof(Bwd, grad_a_log) == 288);
static_assert(offsetof(Bwd, grad_dt_bias) == 328);
static_assert(offsetof(Bwd, grad_initial_state) == 368);
static_assert(offsetof(Bwd, problem) == 408);
