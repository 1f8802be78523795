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
static_assert(sizeof(AttentionFwd) == 336);
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
static_assert(offsetof(AttentionFwd, features) == 208);
static_assert(offsetof(AttentionFwd, counter) == 328);

using Features = flashvar_attention_features;
static_assert(sizeof(Features) == 120);
static_assert(offsetof(Features, cu_seqlens_q) == 0);
static_assert(offsetof(Features, cu_seqlens_k) == 8);
static_assert(offsetof(Features, seqused_k) == 16);
static_assert(offsetof(Features, total_q) == 24);
static_assert(offsetof(Features, total_k) == 32);
static_assert(offsetof(Features, alibi_slopes) == 40);
static_assert(offsetof(Features, alibi_batch_stride) == 48);
static_assert(offsetof(Features, bias) == 56);
static_assert(offsetof(Features, rng) == 88);
static_assert(offsetof(Features, dropout_p) == 96);
static_assert(offsetof(Features, softcap) == 100);
static_assert(offsetof(Features, window_left) == 104);
static_assert(offsetof(Features, window_right) == 108);
static_assert(offsetof(Features, head_dim_v) == 112);
static_assert(offsetof(Features, bias_dtype) == 116);

using AttentionBwd = flashvar_attention_bwd_params;
static_assert(sizeof(AttentionBwd) == 512);
static_assert(offsetof(AttentionBwd, struct_size) == 0);
static_assert(offsetof(AttentionBwd, abi_version) == 4);
static_assert(offsetof(AttentionBwd, device) == 8);
static_assert(offsetof(AttentionBwd, dtype) == 12);
static_assert(offsetof(AttentionBwd, stream) == 16);
static_assert(offsetof(AttentionBwd, q) == 24);
static_assert(offsetof(AttentionBwd, k) == 56);
static_assert(offsetof(AttentionBwd, v) == 88);
static_assert(offsetof(AttentionBwd, out) == 120);
static_assert(offsetof(AttentionBwd, grad_out) == 152);
static_assert(offsetof(AttentionBwd, grad_q) == 184);
static_assert(offsetof(AttentionBwd, grad_k) == 216);
static_assert(offsetof(AttentionBwd, grad_v) == 248);
static_assert(offsetof(AttentionBwd, grad_bias) == 280);
static_assert(offsetof(AttentionBwd, lse) == 312);
static_assert(offsetof(AttentionBwd, grad_lse) == 320);
static_assert(offsetof(AttentionBwd, workspace) == 328);
static_assert(offsetof(AttentionBwd, workspace_size) == 336);
static_assert(offsetof(AttentionBwd, batch) == 344);
static_assert(offsetof(AttentionBwd, seqlen_q) == 352);
static_assert(offsetof(AttentionBwd, seqlen_k) == 360);
static_assert(offsetof(AttentionBwd, heads_q) == 368);
static_assert(offsetof(AttentionBwd, heads_kv) == 372);
static_assert(offsetof(AttentionBwd, head_dim) == 376);
static_assert(offsetof(AttentionBwd, flags) == 380);
static_assert(offsetof(AttentionBwd, scale) == 384);
static_assert(offsetof(AttentionBwd, reserved) == 388);
static_assert(offsetof(AttentionBwd, features) == 392);
