// Checks the parameters of attention_fwd or attention_bwd and converts them to attention::Problem.
// Forward and backward share this: their parameter structs use the same names for the fields that
// both have.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "abi/attention.h"
#include "abi/call.h"
#include "abi/error.h"
#include "attention/problem.h"

namespace flashvar {

inline constexpr double kLog2EDouble = 1.44269504088896340736;
// Longest sequence. Kernels compute with 32-bit rows: ends of tiles, and diagonals one tile beyond
// them, stay below 2^31.
inline constexpr int64_t kMaxSeqlen = (int64_t{1} << 30) - 1024;

// The bits of `flags` that attention.h defines.
inline constexpr uint32_t kAttentionFlags =
    FLASHVAR_CAUSAL | FLASHVAR_WINDOW_LEFT | FLASHVAR_WINDOW_RIGHT | FLASHVAR_DETERMINISTIC;

inline bool is_length(int64_t length) { return length >= 0 && length <= kMaxSeqlen; }

inline bool is_head_dim(int32_t head_dim) { return head_dim > 0 && head_dim % 8 == 0; }

inline int32_t head_dim_v(const flashvar_attention_problem& p) {
  return p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
}

// Query rows of a dense sequence, or of all varlen sequences together.
inline int64_t query_rows(const flashvar_attention_problem& p) {
  return p.cu_seqlens_q == nullptr ? p.seqlen_q : p.total_q;
}

// Likewise key rows.
inline int64_t key_rows(const flashvar_attention_problem& p) {
  return p.cu_seqlens_k == nullptr ? p.seqlen_k : p.total_k;
}

inline flashvar_status check_modifiers(const flashvar_attention_problem& p) {
  if (p.bias.data != nullptr && (p.cu_seqlens_q != nullptr || p.cu_seqlens_k != nullptr)) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "bias must be NULL with cu_seqlens_q or cu_seqlens_k, found its address: pass "
                "sequences of one length, or no bias");
  }
  if (p.bias_dtype > 1) {
    return fail(FLASHVAR_INVALID_ARGUMENT, "bias_dtype must be 0 or 1, found %u: convert the bias",
                p.bias_dtype);
  }
  if (!(p.dropout_p >= 0.f && p.dropout_p < 1.f) || (p.dropout_p > 0.f) != (p.rng != nullptr)) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "dropout_p must be at least 0 and below 1, with rng where it is not 0, found %g "
                "%s rng: pass both, or neither",
                p.dropout_p, p.rng == nullptr ? "without" : "with");
  }
  if (!(p.softcap >= 0.f && p.softcap <= FLT_MAX)) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "softcap must be finite and not negative, found %g: pass 0 for none", p.softcap);
  }
  if (!std::isfinite(p.scale)) {
    return fail(FLASHVAR_INVALID_ARGUMENT, "scale must be finite, found %g: pass a finite one",
                p.scale);
  }
  if (p.sinks_dtype > FLASHVAR_FP32) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "sinks_dtype must be 0, 1 or 2, found %u: set it to a flashvar_dtype",
                p.sinks_dtype);
  }
  return FLASHVAR_OK;
}

inline flashvar_status check_mask(const flashvar_attention_problem& p) {
  if (((p.flags & FLASHVAR_WINDOW_LEFT) != 0 && p.window_left < 0) ||
      ((p.flags & FLASHVAR_WINDOW_RIGHT) != 0 && p.window_right < 0)) {
    return fail(
        FLASHVAR_INVALID_ARGUMENT,
        "windows must not be negative, found %d and %d: clear the flag of a side that has none",
        p.window_left, p.window_right);
  }
  return FLASHVAR_OK;
}

inline flashvar_status check_sizes(const flashvar_attention_problem& p) {
  bool const is_batch = 0 <= p.batch && p.batch <= INT32_MAX;
  if (!is_batch || !is_length(p.seqlen_q) || !is_length(p.seqlen_k)) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "batch must be 0 to 2^31 - 1 and sequence lengths 0 to %lld, found batch %lld, "
                "seqlen_q %lld, seqlen_k %lld: split the call",
                static_cast<long long>(kMaxSeqlen), static_cast<long long>(p.batch),
                static_cast<long long>(p.seqlen_q), static_cast<long long>(p.seqlen_k));
  }
  if ((p.cu_seqlens_q != nullptr && !is_length(p.total_q)) ||
      (p.cu_seqlens_k != nullptr && !is_length(p.total_k))) {
    return fail(
        FLASHVAR_INVALID_ARGUMENT,
        "packed sequences must have 0 to %lld rows, found total_q %lld, total_k %lld: split "
        "the call",
        static_cast<long long>(kMaxSeqlen), static_cast<long long>(p.total_q),
        static_cast<long long>(p.total_k));
  }
  if (p.heads_q <= 0 || p.heads_kv <= 0 || p.heads_q % p.heads_kv != 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "heads_q must be a positive multiple of heads_kv, found %d and %d: repeat kv heads",
                p.heads_q, p.heads_kv);
  }
  if (!is_head_dim(p.head_dim) || !is_head_dim(head_dim_v(p))) {
    return fail(
        FLASHVAR_INVALID_ARGUMENT,
        "head_dim must be a positive multiple of 8, found %d and %d for values: pad the tensors",
        p.head_dim, head_dim_v(p));
  }
  return FLASHVAR_OK;
}

inline flashvar_status check_attention(const flashvar_attention_problem& p) {
  flashvar_status status = check_reserved("problem", p.reserved);
  if (status == FLASHVAR_OK) status = check_flags(p.flags, kAttentionFlags);
  if (status == FLASHVAR_OK) status = check_sizes(p);
  if (status == FLASHVAR_OK) status = check_mask(p);
  if (status == FLASHVAR_OK) status = check_modifiers(p);
  return status;
}

inline attention::Tensor view(const flashvar_tensor& tensor, bool varlen) {
  return {static_cast<uint16_t*>(tensor.data), varlen ? 0 : tensor.batch_stride, tensor.seq_stride,
          tensor.head_stride};
}

inline attention::BiasView bias_view(const flashvar_tensor& bias) {
  return {bias.data, bias.batch_stride, bias.head_stride, bias.seq_stride};
}

// The width of a window; kUnbounded where there is no window or it is wider than any sequence.
inline int32_t window(uint32_t flags, uint32_t flag, int32_t width) {
  return (flags & flag) == 0 || width >= kMaxSeqlen ? attention::kUnbounded : width;
}

inline attention::ScoreModifiers score_modifiers(const flashvar_attention_problem& p) {
  // dropout_p in steps of 2^-16: of 65536 equally likely 16-bit numbers, so many drop an element.
  // Never all of them, or dropout_scale would be infinite.
  uint32_t const dropped =
      std::min<uint32_t>(static_cast<uint32_t>(double{p.dropout_p} * 65536.0 + 0.5), 65535);
  attention::ScoreModifiers to{};
  to.scale = p.scale;
  to.softcap = p.softcap;
  if (p.softcap != 0.f) {
    to.softcap_exponent = static_cast<float>(std::fmin(2. * kLog2EDouble / p.softcap, FLT_MAX));
  }
  to.alibi_slopes = p.alibi_slopes;
  to.alibi_batch_stride = p.alibi_batch_stride;
  to.bias = bias_view(p.bias);
  to.bias_is_fp32 = p.bias_dtype == 1;
  to.bias_alignment = to.bias.alignment(p.bias_dtype == 1 ? 4 : 2);
  to.rng = p.rng;
  to.dropout_threshold = dropped << 16;
  to.dropout_scale = 65536.f / static_cast<float>(65536 - dropped);
  return to;
}

// Fills the part of a problem that forward and backward share. `lse` is an argument of its own: the
// backward's is const.
template <class Params>
void translate(const Params& params, float* lse, attention::Problem& to) {
  const flashvar_attention_problem& p = params.problem;
  bool const varlen_q = p.cu_seqlens_q != nullptr, varlen_k = p.cu_seqlens_k != nullptr;
  double const magnitude = p.scale == 0.f ? 1. : std::fabs(p.scale);
  bool const causal = (p.flags & FLASHVAR_CAUSAL) != 0;
  to.q = view(params.q, varlen_q);
  to.k = view(params.k, varlen_k);
  to.v = view(params.v, varlen_k);
  to.out = view(params.out, varlen_q);
  to.lse = lse;
  to.batch = p.batch;
  to.queries = {p.cu_seqlens_q, static_cast<int32_t>(p.seqlen_q), static_cast<int32_t>(p.total_q)};
  to.keys = {p.cu_seqlens_k, static_cast<int32_t>(p.seqlen_k), static_cast<int32_t>(p.total_k)};
  to.seqused_k = p.seqused_k;
  to.heads_q = p.heads_q;
  to.group = p.heads_q / p.heads_kv;
  to.head_dim = p.head_dim;
  to.head_dim_v = head_dim_v(p);
  to.window_left = window(p.flags, FLASHVAR_WINDOW_LEFT, p.window_left);
  to.window_right = causal ? 0 : window(p.flags, FLASHVAR_WINDOW_RIGHT, p.window_right);
  to.score_sign = p.scale > 0.f ? 1.f : p.scale < 0.f ? -1.f : 0.f;
  to.scale_log2 = static_cast<float>(std::fmin(magnitude * kLog2EDouble, FLT_MAX));
  to.modifiers = score_modifiers(p);
}

template <class Kernel>
flashvar_status fail_no_kernel(const char* function, const Kernel* const* table,
                               const flashvar_attention_problem& p) {
  char held[512] = "nothing";
  int length = 0;
  for (; *table != nullptr && length < static_cast<int>(sizeof(held)) - 48; ++table) {
    length += std::snprintf(held + length, sizeof(held) - length, "%s(dtype %u, head_dim %d / %d)",
                            length == 0 ? "" : ", ", (*table)->dtype, (*table)->head_dim,
                            (*table)->head_dim_v);
  }
  return fail(FLASHVAR_NO_KERNEL,
              "no %s kernel for dtype %u, head_dim %d / %d; this binary holds %s", function,
              p.dtype, p.head_dim, head_dim_v(p), held);
}

// Finds the kernel with the smallest head dims that are at least the call's. `table` ends with
// null.
template <class Kernel>
flashvar_status find_kernel(const char* function, const Kernel* const* table,
                            const flashvar_attention_problem& p, const Kernel*& found) {
  int const dim = p.head_dim, dim_v = head_dim_v(p);
  found = nullptr;
  for (const Kernel* const* row = table; *row != nullptr; ++row) {
    const Kernel& kernel = **row;
    if (kernel.dtype != p.dtype || kernel.head_dim < dim || kernel.head_dim_v < dim_v) continue;
    if (found == nullptr ||
        kernel.head_dim + kernel.head_dim_v < found->head_dim + found->head_dim_v) {
      found = &kernel;
    }
  }
  return found != nullptr ? FLASHVAR_OK : fail_no_kernel(function, table, p);
}

}  // namespace flashvar
