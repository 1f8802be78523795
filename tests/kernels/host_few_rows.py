"""The attention forward for few rows (sm90/attention/fwd_few.cuh), launched on the host."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import host_attention
import host_program
import torch
from oracle import Call, assert_right

_HEADERS = """
#define __CUDACC__
#include "device.h"
inline float __logf(float x) { return std::log(x); }
inline float __expf(float x) { return std::exp(x); }
#include "attention/fwd_merge.cuh"
#include "attention/pack_gqa.h"
#include "core/target.h"
// What the kernel calls `shared` is declared elsewhere; nothing uses it (smem_address).
#undef __shared__
#define __shared__
#include "sm90/attention/fwd_few_launch.cuh"
namespace flashvar::sm90::attention {
unsigned char shared[1];
}
"""
_FUNCTIONS = """
using namespace flashvar;
using namespace flashvar::sm90::attention;

// Tensors are contiguous, [batch, seqlen, heads, head_dim] or packed, except that rows of `out` are
// `out_row` elements.
struct Call {
  uint16_t *q, *k, *v, *out;
  float* lse;
  const float* sinks;
  const int32_t *offsets_q, *offsets_k, *seqused;
  int32_t batch, queries, keys, total_q, total_k, heads, group, head_dim, head_dim_v, out_row;
  int32_t left, right, row_shift, count, in_cluster, runs_clusters;
  float scale;
};

FwdProblem problem_of(const Call& call) {
  FwdProblem problem = made(call.batch, call.queries, call.keys, call.heads, call.group, call.left,
                            call.right);
  auto const view = [&](uint16_t* data, int32_t row, int32_t heads, int32_t seqlen, bool varlen) {
    int64_t const seq_stride = int64_t{row} * heads;
    return flashvar::attention::Tensor{data, varlen ? 0 : seqlen * seq_stride, seq_stride, row};
  };
  bool const varlen_q = call.offsets_q != nullptr, varlen_k = call.offsets_k != nullptr;
  int32_t const heads_kv = call.heads / call.group;
  problem.q = view(call.q, call.head_dim, call.heads, call.queries, varlen_q);
  problem.k = view(call.k, call.head_dim, heads_kv, call.keys, varlen_k);
  problem.v = view(call.v, call.head_dim_v, heads_kv, call.keys, varlen_k);
  problem.out = view(call.out, call.out_row, call.heads, call.queries, varlen_q);
  problem.lse = call.lse;
  problem.sinks = {call.sinks, dtype::fp32::kAbi};
  problem.queries = {call.offsets_q, call.queries, call.total_q};
  problem.keys = {call.offsets_k, call.keys, call.total_k};
  problem.seqused_k = call.seqused;
  problem.head_dim = call.head_dim;
  problem.head_dim_v = call.head_dim_v;
  problem.score_sign = call.scale < 0.f ? -1.f : call.scale > 0.f ? 1.f : 0.f;
  problem.scale_log2 = (call.scale == 0.f ? 1.f : std::fabs(call.scale)) * kLog2E;
  return problem;
}

template <class Dtype, int kHeadDim, int kHeadDimV, int kRows>
int launch(const Call& call) {
  using Hopper = Target<90, 232448>;
  constexpr PackGqaTile kNeverSeveral{64, 128, 3, INT32_MAX};
  FwdProblem const whole = problem_of(call);
  FwdProblem problem = call.row_shift > 0 ? pack_gqa(whole, call.row_shift)
                                          : simplified(whole, kNeverSeveral);
  if (problem.queries.seqlen > kRows) std::abort();
  FewSplits const splits{call.count, call.in_cluster != 0};
  constexpr float kAfter = 7.f;
  std::vector<float> results(splits.workspace(problem) / sizeof(float) + 1, NAN);
  results.back() = kAfter;
  splits.assign(problem, reinterpret_cast<unsigned char*>(results.data()));
  device_runs_clusters = call.runs_clusters != 0;
  cudaError_t const error =
      launch_fwd_few<Hopper, FewConfig<Hopper, Dtype, kHeadDim, kHeadDimV, kRows>>(
          whole, problem, splits, 0, {});
  return results.back() == kAfter ? error : -1;
}
"""
_LAUNCH = """
extern "C" int launch_{number}(const Call& call) {{
  return launch<dtype::{dtype}, {head_dim}, {head_dim_v}, {rows}>(call);
}}
"""


class Config(NamedTuple):
    """An instantiation of the kernel."""

    dtype: str
    head_dim: int
    head_dim_v: int
    rows: int

    def __str__(self) -> str:
        return f"{self.dtype}-{self.head_dim}x{self.head_dim_v}-{self.rows}"


class _CallOnHost(ctypes.Structure):
    """The struct of the same fields in the program."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "sinks")),
        *((name, ctypes.c_void_p) for name in ("offsets_q", "offsets_k", "seqused")),
        *((name, ctypes.c_int32) for name in ("batch", "queries", "keys", "total_q", "total_k")),
        *((name, ctypes.c_int32) for name in ("heads", "group", "head_dim", "head_dim_v")),
        *((name, ctypes.c_int32) for name in ("out_row", "left", "right", "row_shift", "count")),
        *((name, ctypes.c_int32) for name in ("in_cluster", "runs_clusters")),
        ("scale", ctypes.c_float),
    ]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class FewRows:
    """A call, how its heads are packed, and how its keys are split.

    `used`: keys in use of each sequence, or of all; those after them are NaN. `lengths_q`: of
    packed queries, with `outside` rows before and after them that belong to no sequence.
    """

    queries: int
    keys: int
    heads: int = 1
    group: int = 1
    batch: int = 1
    head_dim: int | None = None  # None: the config's
    head_dim_v: int | None = None
    window: tuple[int, int] = (-1, -1)
    scale: float = 0.1
    used: tuple[int, ...] = ()
    lengths_q: tuple[int, ...] = ()
    outside: int = 0
    packed_keys: bool = False
    sinks: tuple[float, ...] = ()
    row_shift: int = 0
    splits: int = 1
    in_cluster: bool = False
    runs_clusters: bool = True  # the device does
    lse: bool = True
    equal: float = 0.0  # all elements of k, and those of q with the other sign


class Library:
    """The program, compiled once for some configs."""

    def __init__(self, folder: Path, configs: tuple[Config, ...]) -> None:
        launches = "".join(
            _LAUNCH.format(number=number, **config._asdict())
            for number, config in enumerate(configs)
        )
        program = _HEADERS + host_attention.PROBLEM + _FUNCTIONS + launches
        self._configs = configs
        self._library = host_program.library(program, folder, None, "-O1")

    def check(self, config: Config, few: FewRows) -> None:
        """Run a call, and compare it with the oracle."""
        assert_right(*self.run(config, few))

    def run(
        self, config: Config, few: FewRows
    ) -> tuple[Call, torch.Tensor] | tuple[Call, torch.Tensor, torch.Tensor]:
        """The call, its output and its log-sum-exp; nothing beside them was written."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[config.dtype]
        dim = few.head_dim or config.head_dim
        dim_v = few.head_dim_v or config.head_dim_v
        batch = len(few.lengths_q) or few.batch
        heads_kv, varlen = few.heads // few.group, bool(few.lengths_q)
        # Packed, which is also how dense tensors of no other rows lie.
        total_q = sum(few.lengths_q) + 2 * few.outside if varlen else batch * few.queries
        q = torch.randn(total_q, few.heads, dim).to(dtype)
        k = torch.randn(batch, few.keys, heads_kv, dim).to(dtype)
        v = torch.randn(batch, few.keys, heads_kv, dim_v).to(dtype)
        if few.equal:
            q.fill_(-few.equal)
            k.fill_(few.equal)
        used = few.used * batch if len(few.used) == 1 else few.used
        for tensor in (k, v):
            for number, count in enumerate(used):
                tensor[number, count:] = torch.nan
        lengths = few.lengths_q or (few.queries,) * batch
        offsets_q = torch.tensor([0, *lengths]).cumsum(0).int() + few.outside
        offsets_k = torch.arange(batch + 1).int() * few.keys
        seqused = torch.tensor(used).int() if used else None
        sinks = torch.tensor(few.sinks).float() if few.sinks else None
        # Rows of `out` have more columns than are written, and more rows follow.
        storage = torch.full((total_q + 1, few.heads, dim_v + 8), 7.0, dtype=dtype)
        lse = torch.full((total_q * few.heads + 1,), 7.0)
        call = _CallOnHost(
            *map(_address, (q, k, v, storage, lse if few.lse else None, sinks)),
            _address(offsets_q if varlen else None),
            _address(offsets_k if few.packed_keys else None),
            _address(seqused),
            *(batch, few.queries, few.keys, total_q if varlen else 0),
            batch * few.keys if few.packed_keys else 0,
            *(few.heads, few.group, dim, dim_v, dim_v + 8, *few.window),
            *(few.row_shift, few.splits, int(few.in_cluster)),
            *(int(few.runs_clusters), few.scale),
        )
        launch = getattr(self._library, f"launch_{self._configs.index(config)}")
        assert launch(ctypes.byref(call)) == 0
        assert (storage[:, :, dim_v:] == 7).all()
        assert (storage[-1] == 7).all()
        assert lse[-1] == 7
        expected = Call(
            q=q,
            k=k,
            v=v,
            scale=few.scale,
            window=few.window,
            sinks=sinks,
            cu_seqlens_q=offsets_q,
            seqused_k=seqused,
        )
        out = storage[:-1, :, :dim_v]
        if not few.lse:
            assert (lse == 7).all()
            return expected, out
        of_heads = lse[:-1].view(1 if varlen else batch, few.heads, -1).transpose(0, 1).flatten(1)
        return expected, out, of_heads
