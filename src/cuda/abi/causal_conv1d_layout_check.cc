// The layout of the parameters of causal_conv1d, frozen (see layout_check.cc).
#include <cstddef>

#include "abi/causal_conv1d.h"

using Strided = flashvar_strided;
static_assert(sizeof(Strided) == 40);
static_assert(offsetof(Strided, data) == 0);
static_assert(offsetof(Strided, first_stride) == 8);
static_assert(offsetof(Strided, second_stride) == 16);
static_assert(offsetof(Strided, third_stride) == 24);
static_assert(offsetof(Strided, dtype) == 32);
static_assert(offsetof(Strided, reserved) == 36);

using Problem = flashvar_causal_conv1d_problem;
static_assert(sizeof(Problem) == 216);
static_assert(offsetof(Problem, batch) == 0);
static_assert(offsetof(Problem, seqlen) == 8);
static_assert(offsetof(Problem, dim) == 16);
static_assert(offsetof(Problem, sequences) == 24);
static_assert(offsetof(Problem, width) == 32);
static_assert(offsetof(Problem, columns) == 36);
static_assert(offsetof(Problem, dtype) == 40);
static_assert(offsetof(Problem, flags) == 44);
static_assert(offsetof(Problem, cu_seqlens) == 48);
static_assert(offsetof(Problem, x) == 56);
static_assert(offsetof(Problem, weight) == 96);
static_assert(offsetof(Problem, bias) == 136);
static_assert(offsetof(Problem, state) == 176);

using Fwd = flashvar_causal_conv1d_fwd_params;
static_assert(sizeof(Fwd) == 384);
static_assert(offsetof(Fwd, call) == 0);
static_assert(offsetof(Fwd, y) == 40);
static_assert(offsetof(Fwd, residual) == 80);
static_assert(offsetof(Fwd, final_state) == 120);
static_assert(offsetof(Fwd, final_columns) == 160);
static_assert(offsetof(Fwd, reserved) == 164);
static_assert(offsetof(Fwd, problem) == 168);

using Bwd = flashvar_causal_conv1d_bwd_params;
static_assert(sizeof(Bwd) == 504);
static_assert(offsetof(Bwd, call) == 0);
static_assert(offsetof(Bwd, grad_x) == 40);
static_assert(offsetof(Bwd, grad_weight) == 80);
static_assert(offsetof(Bwd, grad_bias) == 120);
static_assert(offsetof(Bwd, grad_state) == 160);
static_assert(offsetof(Bwd, grad_y) == 200);
static_assert(offsetof(Bwd, grad_final) == 240);
static_assert(offsetof(Bwd, final_columns) == 280);
static_assert(offsetof(Bwd, reserved) == 284);
static_assert(offsetof(Bwd, problem) == 288);

using Update = flashvar_causal_conv1d_update_params;
static_assert(sizeof(Update) == 352);
static_assert(offsetof(Update, call) == 0);
static_assert(offsetof(Update, y) == 40);
static_assert(offsetof(Update, residual) == 80);
static_assert(offsetof(Update, state_indices) == 120);
static_assert(offsetof(Update, state_positions) == 128);
static_assert(offsetof(Update, problem) == 136);
