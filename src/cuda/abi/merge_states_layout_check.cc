// The layout of the parameters of merge_states, frozen (see layout_check.cc).
#include <cstddef>

#include "abi/merge_states.h"

using Problem = flashvar_merge_states_problem;
static_assert(sizeof(Problem) == 128);
static_assert(offsetof(Problem, batch) == 0);
static_assert(offsetof(Problem, seqlen) == 8);
static_assert(offsetof(Problem, heads) == 16);
static_assert(offsetof(Problem, head_dim) == 20);
static_assert(offsetof(Problem, dtype) == 24);
static_assert(offsetof(Problem, parts) == 28);
static_assert(offsetof(Problem, outs) == 32);
static_assert(offsetof(Problem, outs_part_stride) == 64);
static_assert(offsetof(Problem, out_parts) == 72);
static_assert(offsetof(Problem, lses) == 80);
static_assert(offsetof(Problem, lses_part_stride) == 112);
static_assert(offsetof(Problem, lse_parts) == 120);

using Fwd = flashvar_merge_states_fwd_params;
static_assert(sizeof(Fwd) == 208);
static_assert(offsetof(Fwd, call) == 0);
static_assert(offsetof(Fwd, out) == 40);
static_assert(offsetof(Fwd, lse) == 72);
static_assert(offsetof(Fwd, problem) == 80);

using Bwd = flashvar_merge_states_bwd_params;
static_assert(sizeof(Bwd) == 264);
static_assert(offsetof(Bwd, call) == 0);
static_assert(offsetof(Bwd, grad_out) == 40);
static_assert(offsetof(Bwd, grad_lse) == 72);
static_assert(offsetof(Bwd, grad_outs) == 80);
static_assert(offsetof(Bwd, grad_outs_part_stride) == 112);
static_assert(offsetof(Bwd, grad_lses) == 120);
static_assert(offsetof(Bwd, problem) == 128);
static_assert(offsetof(Bwd, skipped_outs) == 256);
