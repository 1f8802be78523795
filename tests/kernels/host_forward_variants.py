"""Which kernel and tiles the forward of 9.0 takes for a call, compiled for the host."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import host_attention

_FUNCTIONS: Final = """
template <int kHeadDim>
using VariantsOf = FwdVariants<Target<90, 232448>, dtype::bf16, kHeadDim, kHeadDim>;

template <int kHeadDim>
int variant_of(const FwdProblem& call) {
  using Variants = VariantsOf<kHeadDim>;
  FwdProblem const problem = Variants::simplified(call);
  return Variants::with_config(problem, [](auto config, auto splits) {
    using C = decltype(config);
    if constexpr (std::is_same_v<decltype(splits), FewSplits>) {
      return C::kBlockQ == 8 ? 9 : C::kBlockQ == 16 ? 10 : 11;
    } else {
      if (C::kShiftsK || C::kShiftsV) return static_cast<int>(FwdVariant::kLines);
      if (C::kOneCtaPerSM) return static_cast<int>(FwdVariant::kSmallSplit);
      if (C::kSplits) return static_cast<int>(FwdVariant::kSplit);
      return static_cast<int>(C::kTile.variant);
    }
  });
}

int variant_up_to(int32_t head_dim, const FwdProblem& call) {
  return head_dim > 96   ? variant_of<128>(call)
         : head_dim > 80 ? variant_of<96>(call)
         : head_dim > 64 ? variant_of<80>(call)
                         : variant_of<64>(call);
}

// The call's FwdVariant; 9, 10 and 11 stand for the kernel for 8, for 16 and for 32 rows.
extern "C" int variant(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                       int32_t heads, int32_t group, int32_t right, int32_t what) {
  static float sinks[1];
  FwdProblem problem = made(batch, queries, keys, heads, group, -1, right);
  static int32_t const offsets[2] = {};
  if (what == 1) problem.sinks = {sinks, 2};
  if (what == 2) problem.modifiers.softcap = 5.f;
  if (what == 3) problem.queries.offsets = offsets;
  return head_dim == 64 ? variant_of<64>(problem) : head_dim == 128 ? variant_of<128>(problem)
                                                                    : variant_of<256>(problem);
}

// A call without a mask: the distances of positions in k and in v, and of heads. `what`: the sum of
// 1 with packed keys, 2 with two query heads for each of k and v.
FwdProblem with_rows(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                     int32_t stride_k, int32_t stride_v, int32_t head_stride, int32_t what) {
  static int32_t const offsets[2] = {};
  FwdProblem problem = made(batch, queries, keys, what & 2 ? 16 : 8, what & 2 ? 2 : 1);
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.k = {nullptr, 0, stride_k, head_stride};
  problem.v = {nullptr, 0, stride_v, head_stride};
  if (what & 1) problem.keys.offsets = offsets;
  return problem;
}

// Its FwdVariant.
extern "C" int variant_of_rows(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                               int32_t stride_k, int32_t stride_v, int32_t head_stride,
                               int32_t what) {
  return variant_up_to(head_dim, with_rows(head_dim, batch, queries, keys, stride_k, stride_v,
                                           head_stride, what));
}

// The bytes of its splits' results at head dims of 80 and less, with values of 8 columns: there
// splits save the most time.
extern "C" int64_t split_bytes_of_rows(int32_t head_dim, int32_t batch, int32_t queries,
                                       int32_t keys, int32_t stride_k, int32_t stride_v,
                                       int32_t head_stride, int32_t what) {
  using Variants = VariantsOf<80>;
  FwdProblem call =
      with_rows(head_dim, batch, queries, keys, stride_k, stride_v, head_stride, what);
  call.head_dim_v = 8;
  FwdProblem const problem = Variants::simplified(call);
  return Variants::with_config(problem, [&](auto, auto splits) {
    if constexpr (std::is_same_v<decltype(splits), FewSplits>) {
      return static_cast<int64_t>(splits.workspace(problem));
    } else {
      return static_cast<int64_t>(KeySplitsWorkspace(problem, splits).bytes);
    }
  });
}

// The FwdVariant of a call of 8 heads. Windows: negative where they have no bound. `what`: 1 with
// packed keys, 2 with sinks.
extern "C" int variant_of_dims(int32_t head_dim, int32_t head_dim_v, int32_t batch, int32_t queries,
                               int32_t keys, int32_t left, int32_t right, int32_t what) {
  static int32_t const offsets[2] = {};
  static float sinks[1];
  FwdProblem problem = made(batch, queries, keys, 8, 1, left, right);
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  if (what == 1) problem.keys.offsets = offsets;
  if (what == 2) problem.sinks = {sinks, 2};
  return variant_up_to(std::max(head_dim, head_dim_v), problem);
}

// Whether heads are packed for several queries per sequence. `what`: 1 with softcap, 2 with varlen
// queries.
extern "C" int packs(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys, int32_t heads,
                     int32_t group, int32_t left, int32_t right, int32_t what) {
  static int32_t const offsets[2] = {};
  FwdProblem call = made(batch, queries, keys, heads, group, left, right);
  if (what == 1) call.modifiers.softcap = 5.f;
  if (what == 2) call.queries.offsets = offsets;
  FwdProblem const problem = head_dim == 64    ? VariantsOf<64>::simplified(call)
                             : head_dim == 128 ? VariantsOf<128>::simplified(call)
                                               : VariantsOf<256>::simplified(call);
  return problem.splits.row_shift > 0;
}
"""
# What variant() returns: numbers of FwdVariant, then those of the kernel for few rows.
GENERAL, MEDIUM, SMALL, SPLIT, SMALL_SPLIT, MODIFIERS, SMALL_MODIFIERS, LINES, WIDE = range(9)
ROWS_8, ROWS_16, ROWS_32 = 9, 10, 11


def library(folder: Path) -> ctypes.CDLL:
    """The program's functions; `folder` is where it is compiled."""
    found = host_attention.library(folder, _FUNCTIONS, "fwd_variants.h")
    found.split_bytes_of_rows.restype = ctypes.c_int64
    return found
