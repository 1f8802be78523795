// Checks the parameters that both functions of merge_states share, and converts them to
// merge_states::Problem.
#pragma once
#include <cstdint>

#include "abi/call.h"
#include "abi/error.h"
#include "abi/merge_states.h"
#include "merge_states/problem.h"

namespace flashvar {

static_assert(FLASHVAR_MERGE_STATES_MAX_ADDRESSES == merge_states::kMaxAddresses);

inline merge_states::Tensor view(const flashvar_tensor& tensor) {
  return {tensor.data, tensor.batch_stride, tensor.seq_stride, tensor.head_stride};
}

inline flashvar_status check_merge_states(const flashvar_merge_states_problem& p) {
  auto is_count = [](int64_t count) { return 0 <= count && count <= INT32_MAX; };
  if (!is_count(p.batch) || !is_count(p.seqlen) || p.heads < 0 || p.head_dim < 0) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "sizes must be 0 to 2^31 - 1, found batch %lld, seqlen %lld, heads %d, head_dim "
                "%d: split the call",
                static_cast<long long>(p.batch), static_cast<long long>(p.seqlen), p.heads,
                p.head_dim);
  }
  int64_t rows = 0;
  if (__builtin_mul_overflow(p.batch * p.seqlen, int64_t{p.heads}, &rows)) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "rows must be below 2^63, found %lld * %lld * %d: split the call",
                static_cast<long long>(p.batch), static_cast<long long>(p.seqlen), p.heads);
  }
  bool const listed = p.out_parts != nullptr || p.lse_parts != nullptr;
  if (p.parts < 1 || (listed && p.parts > merge_states::kMaxAddresses)) {
    return fail(FLASHVAR_INVALID_ARGUMENT,
                "parts must be at least 1, and at most %d where they are addresses, found %d: "
                "stack more than that",
                merge_states::kMaxAddresses, p.parts);
  }
  return FLASHVAR_OK;
}

inline merge_states::Problem merge_states_problem(const flashvar_merge_states_problem& p) {
  merge_states::Problem to{};
  to.batch = p.batch;
  to.seqlen = p.seqlen;
  to.heads = p.heads;
  to.head_dim = p.head_dim;
  to.parts = p.parts;
  to.outs = {view(p.outs), p.outs_part_stride, p.out_parts};
  to.lses = {view(p.lses), p.lses_part_stride, p.lse_parts};
  return to;
}

// The address of part 0, or NULL if the address of any part is.
inline const void* address_of_parts(const flashvar_tensor& first, const void* const* addresses,
                                    int32_t parts) {
  if (addresses == nullptr) return first.data;
  for (int32_t i = 0; i < parts; ++i) {
    if (addresses[i] == nullptr) return nullptr;
  }
  return addresses[0];
}

inline Pointer outs_pointer(const flashvar_merge_states_problem& p) {
  return {p.out_parts == nullptr ? "outs.data" : "every part in out_parts",
          address_of_parts(p.outs, p.out_parts, p.parts), p.head_dim > 0};
}

inline Pointer lses_pointer(const flashvar_merge_states_problem& p) {
  return {p.lse_parts == nullptr ? "lses.data" : "every part in lse_parts",
          address_of_parts(p.lses, p.lse_parts, p.parts)};
}

inline bool is_empty(const flashvar_merge_states_problem& p) {
  return p.batch == 0 || p.seqlen == 0 || p.heads == 0;
}

}  // namespace flashvar
