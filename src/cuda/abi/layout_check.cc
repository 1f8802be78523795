// The ABI's layout, frozen: compiling this file is the test. Fields are added at the end alone,
// with 0 for "as before" (params.h lets older and newer callers in); any other change of a line
// here is a new FLASHVAR_ABI_VERSION.
#include <cstddef>

#include "abi/flashvar.h"

static_assert(sizeof(flashvar_tensor) == 32);
static_assert(offsetof(flashvar_tensor, batch_stride) == 8);
static_assert(offsetof(flashvar_tensor, seq_stride) == 16);
static_assert(offsetof(flashvar_tensor, head_stride) == 24);

using AttentionFwd = flashvar_attention_fwd_params;
static_assert(sizeof(AttentionFwd) == 208);
static_assert(offsetof(AttentionFwd, struct_size) == 0);
static_assert(offsetof(AttentionFwd, abi_version) == 4);
static_assert(offsetof(AttentionFwd, device) == 8);
static_assert(offsetof(AttentionFwd, dtype) == 12);
static_assert(offsetof(AttentionFwd, stream) == 16);
static_assert(offsetof(AttentionFwd, q) == 24);
static_assert(offsetof(AttentionFwd, k) == 56);
static_assert(offsetof(AttentionFwd, v) == 88);
static_assert(offsetof(AttentionFwd, out) == 120);
static_assert(offsetof(AttentionFwd, lse) == 152);
static_assert(offsetof(AttentionFwd, batch) == 160);
static_assert(offsetof(AttentionFwd, seqlen_q) == 168);
static_assert(offsetof(AttentionFwd, seqlen_k) == 176);
static_assert(offsetof(AttentionFwd, heads_q) == 184);
static_assert(offsetof(AttentionFwd, heads_kv) == 188);
static_assert(offsetof(AttentionFwd, head_dim) == 192);
static_assert(offsetof(AttentionFwd, flags) == 196);
static_assert(offsetof(AttentionFwd, scale) == 200);
static_assert(offsetof(AttentionFwd, reserved) == 204);
