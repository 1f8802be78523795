// Checks the parameters that all functions of causal_conv1d share, and converts them to
// causal_conv1d::Problem.
#pragma once
#include <cstdint>

#include "abi/call.h"
#include "abi/causal_conv1d.h"
#include "abi/error.h"
#include "causal_conv1d/problem.h"

namespace flashvar {

inline causal_conv1d::Tensor view(const flashvar_strided& tensor) {
  return {
      tensor.data, {tensor.first_stride, tensor.second_stride, tensor.third_stride}, tensor.dtype};
}

// The bits of `flags` that causal_conv1d.h defines.
inline constexpr uint32_t kCausalConv1dFlags =
    FLASHVAR_CONV1D_SILU | FLASHVAR_CONV1D_INT64_SEQLENS | FLASHVAR_CONV1D_INT64_INDICES |
    FLASHVAR_CONV1D_INT64_POSITIONS;

// A tensor of any dtype.
inline flashvar_status check_tensor(const char* name, const flashvar_strided& tensor) {
  if (tensor.data != nullptr && tensor.dtype > FLASHVAR_FP32) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "%s.dtype must be 0 to 2, found %u: set it to a flashvar_dtype", name,
                tensor.dtype);
  }
  return check_reserved(name, tensor.reserved);
}

// A tensor that must have the problem's dtype.
inline flashvar_status check_like_x(const char* name, const flashvar_strided& tensor,
                                    const flashvar_causal_conv1d_problem& p) {
  if (tensor.data != nullptr && tensor.dtype != p.dtype) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "%s must have the problem's dtype, %u, found %u: convert it", name, p.dtype,
                tensor.dtype);
  }
  return check_reserved(name, tensor.reserved);
}

// `final_columns`: of the final states, 0 where there are none.
inline flashvar_status check_causal_conv1d(const flashvar_causal_conv1d_problem& p,
                                           int32_t final_columns) {
  flashvar_status status = check_flags(p.flags, kCausalConv1dFlags);
  if (status != FLASHVAR_OK) return status;
  if (p.batch < 0 || p.seqlen < 0 || p.dim < 0 || p.sequences < 0 || p.columns < 0 ||
      final_columns < 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "sizes must be at least 0, found batch %lld, seqlen %lld, dim %lld, sequences "
                "%lld, columns %d, final_columns %d: pass the sizes of the tensors",
                static_cast<long long>(p.batch), static_cast<long long>(p.seqlen),
                static_cast<long long>(p.dim), static_cast<long long>(p.sequences), p.columns,
                final_columns);
  }
  int64_t elements = 0, states = 0;
  int64_t const columns = p.columns > final_columns ? p.columns : final_columns;
  if (__builtin_mul_overflow(p.batch, p.seqlen, &elements) ||
      __builtin_mul_overflow(elements, p.dim, &elements) ||
      __builtin_mul_overflow(p.sequences, p.dim, &states) ||
      __builtin_mul_overflow(states, columns, &states)) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "tensors must have less than 2^63 elements, found batch %lld, seqlen %lld, dim "
                "%lld, sequences %lld: split the call",
                static_cast<long long>(p.batch), static_cast<long long>(p.seqlen),
                static_cast<long long>(p.dim), static_cast<long long>(p.sequences));
  }
  if (p.width < 2 || p.width > 4) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "width must be 2 to 4, found %d: pad a narrower weight with zeros in front",
                p.width);
  }
  if (p.cu_seqlens != nullptr && p.batch != 1) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "batch must be 1 beside cu_seqlens, found %lld: pack the sequences",
                static_cast<long long>(p.batch));
  }
  status = check_like_x("x", p.x, p);
  if (status == FLASHVAR_OK) status = check_tensor("weight", p.weight);
  if (status == FLASHVAR_OK) status = check_tensor("bias", p.bias);
  if (status == FLASHVAR_OK) status = check_tensor("state", p.state);
  return status;
}

// Without cu_seqlens, `sequences` must be the batch.
inline flashvar_status check_sequences(const flashvar_causal_conv1d_problem& p) {
  if (p.cu_seqlens != nullptr || p.sequences == p.batch) return FLASHVAR_OK;
  return fail(
      FLASHVAR_INVALID_ARGUMENT,
      "sequences must be the batch without cu_seqlens, found %lld and %lld: set it to the batch",
      static_cast<long long>(p.sequences), static_cast<long long>(p.batch));
}

inline void translate(const flashvar_causal_conv1d_problem& p, causal_conv1d::Problem& to) {
  to.batch = p.batch;
  to.seqlen = p.seqlen;
  to.dim = p.dim;
  to.sequences = p.sequences;
  to.cu_seqlens = {p.cu_seqlens, (p.flags & FLASHVAR_CONV1D_INT64_SEQLENS) != 0};
  to.width = p.width;
  to.columns = p.columns;
  to.silu = (p.flags & FLASHVAR_CONV1D_SILU) != 0;
  to.x = view(p.x);
  to.weight = view(p.weight);
  to.bias = view(p.bias);
  to.state = view(p.state);
  // Without sequences kernels count every row as sequence 0's, whose state does not exist.
  if (p.sequences == 0) to.state.data = nullptr;
}

inline bool has_tokens(const flashvar_causal_conv1d_problem& p) {
  return p.batch > 0 && p.seqlen > 0 && p.dim > 0;
}

}  // namespace flashvar
