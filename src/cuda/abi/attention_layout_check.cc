// Freezes the layout of attention's parameters (see layout_check.cc).
#include <cstddef>

#include "abi/attention.h"

using Problem = flashvar_attention_problem;
static_assert(sizeof(Problem) == 192);
static_assert(offsetof(Problem, batch) == 0);
static_assert(offsetof(Problem, seqlen_q) == 8);
static_assert(offsetof(Problem, seqlen_k) == 16);
static_assert(offsetof(Problem, total_q) == 24);
static_assert(offsetof(Problem, total_k) == 32);
static_assert(offsetof(Problem, heads_q) == 40);
static_assert(offsetof(Problem, heads_kv) == 44);
static_assert(offsetof(Problem, head_dim) == 48);
static_assert(offsetof(Problem, head_dim_v) == 52);
static_assert(offsetof(Problem, dtype) == 56);
static_assert(offsetof(Problem, flags) == 60);
static_assert(offsetof(Problem, scale) == 64);
static_assert(offsetof(Problem, softcap) == 68);
static_assert(offsetof(Problem, window_left) == 72);
static_assert(offsetof(Problem, window_right) == 76);
static_assert(offsetof(Problem, dropout_p) == 80);
static_assert(offsetof(Problem, bias_dtype) == 84);
static_assert(offsetof(Problem, cu_seqlens_q) == 88);
static_assert(offsetof(Problem, cu_seqlens_k) == 96);
static_assert(offsetof(Problem, seqused_k) == 104);
static_assert(offsetof(Problem, alibi_slopes) == 112);
static_assert(offsetof(Problem, alibi_batch_stride) == 120);
static_assert(offsetof(Problem, rng) == 128);
static_assert(offsetof(Problem, bias) == 136);
static_assert(offsetof(Problem, sinks) == 168);
static_assert(offsetof(Problem, delta) == 176);
static_assert(offsetof(Problem, sinks_dtype) == 184);
static_assert(offsetof(Problem, reserved) == 188);

using Fwd = flashvar_attention_fwd_params;
static_assert(sizeof(Fwd) == 368);
static_assert(offsetof(Fwd, call) == 0);
static_assert(offsetof(Fwd, q) == 40);
static_assert(offsetof(Fwd, k) == 72);
static_assert(offsetof(Fwd, v) == 104);
static_assert(offsetof(Fwd, out) == 136);
static_assert(offsetof(Fwd, lse) == 168);
static_assert(offsetof(Fwd, problem) == 176);

using Bwd = flashvar_attention_bwd_params;
static_assert(sizeof(Bwd) == 536);
static_assert(offsetof(Bwd, call) == 0);
static_assert(offsetof(Bwd, q) == 40);
static_assert(offsetof(Bwd, k) == 72);
static_assert(offsetof(Bwd, v) == 104);
static_assert(offsetof(Bwd, out) == 136);
static_assert(offsetof(Bwd, grad_out) == 168);
static_assert(offsetof(Bwd, grad_q) == 200);
static_assert(offsetof(Bwd, grad_k) == 232);
static_assert(offsetof(Bwd, grad_v) == 264);
static_assert(offsetof(Bwd, grad_bias) == 296);
static_assert(offsetof(Bwd, lse) == 328);
static_assert(offsetof(Bwd, grad_lse) == 336);
static_assert(offsetof(Bwd, problem) == 344);
