"""What the CUDA kernels do with sinks, on the host: the forward's epilogue, and delta for them."""

from __future__ import annotations

import ctypes
from typing import Any

import host_program
import pytest
import torch

from flashvar.ops.attention.sinks import gradient

pytestmark = host_program.needs_compiler

PROGRAM = """
#define __CUDACC__
#include <algorithm>
#include <cmath>
#include "device.h"
using std::max, std::min;
inline float __logf(float x) { return std::log(x); }
#include "attention/bwd_preprocess.cuh"
#include "attention/sinks.cuh"
using namespace flashvar;
using namespace flashvar::attention;

extern "C" void add(const void* sinks, uint32_t dtype, uint32_t head, float* lse, float* inverse) {
  FwdProblem problem{};
  problem.sinks = {sinks, dtype};
  add_sink(sink_of(problem.sinks, head), *lse, *inverse);
}

// Tensors are contiguous, [batch, seqlen, heads, head_dim] or packed, of bf16.
extern "C" void preprocess(uint16_t* out, uint16_t* grad_out, float* lse, const float* grad_lse,
                           float* delta_out, const int32_t* offsets, int32_t batch, int32_t seqlen,
                           int32_t total, int32_t heads, int32_t head_dim, float* lse_log2,
                           float* delta) {
  BwdProblem problem{};
  problem.batch = batch;
  problem.queries = {offsets, seqlen, total};
  problem.heads_q = heads;
  problem.group = 1;
  problem.head_dim_v = head_dim;
  int64_t const row = heads * head_dim;
  problem.out = {out, offsets == nullptr ? seqlen * row : 0, row, head_dim};
  problem.grad_out = {grad_out, problem.out.batch_stride, row, head_dim};
  problem.lse = lse;
  problem.grad_lse = grad_lse;
  problem.delta_out = delta_out;
  int64_t const tiles = problem.queries.tiles(batch, 32);
  PreprocessArgs const args{problem, lse_log2, delta, nullptr, 0, false, tiles, true, nullptr};
  run_blocks(&bwd_preprocess_kernel<dtype::bf16, 32>, args, tiles * heads, kPreprocessThreads);
}
"""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_program.library(PROGRAM, tmp_path_factory.mktemp("sinks"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lse", [-torch.inf, -300.0, -1.5, 0.0, 4.0, 700.0])
@pytest.mark.parametrize("sink", [-torch.inf, -500.0, -1.5, 0.0, 5.0, 900.0])
def test_a_sink_joins_a_row(
    sink: float, lse: float, dtype: torch.dtype, library: ctypes.CDLL
) -> None:
    sinks = torch.tensor([torch.nan, sink]).to(dtype)
    found, factor = ctypes.c_float(lse), ctypes.c_float(3.0)
    address = ctypes.c_void_p(sinks.data_ptr())
    library.add(address, DTYPES.index(dtype), 1, ctypes.byref(found), ctypes.byref(factor))
    both = torch.tensor([lse, sink], dtype=torch.float64)
    assert found.value == pytest.approx(float(both.logsumexp(0)), rel=1e-6, abs=1e-6)
    share = 1.0 if sink == -torch.inf else float((both[0] - both.logsumexp(0)).exp())
    assert factor.value == pytest.approx(3.0 * share, rel=1e-5, abs=1e-30)


def test_no_sinks_leave_a_row_as_it_is(library: ctypes.CDLL) -> None:
    for lse in (-torch.inf, 1.25):
        found, factor = ctypes.c_float(lse), ctypes.c_float(3.0)
        library.add(None, 0, 1, ctypes.byref(found), ctypes.byref(factor))
        assert (found.value, factor.value) == (lse, 3.0)


@pytest.mark.parametrize("with_grad_lse", [True, False])
@pytest.mark.parametrize("offsets", [None, [3, 40, 40, 75]], ids=["dense", "packed"])
def test_delta_of_every_row(
    offsets: list[int] | None, with_grad_lse: bool, library: ctypes.CDLL
) -> None:
    heads, head_dim, seqlen, total = 3, 24, 45, 80
    batch = 2 if offsets is None else len(offsets) - 1
    rows = (batch, seqlen) if offsets is None else (total,)
    out, grad_out = torch.randn(2, *rows, heads, head_dim).bfloat16()
    lse, grad_lse = torch.randn(2, *((batch, heads, seqlen) if offsets is None else (heads, total)))
    lse[..., 5] = -torch.inf  # a row that sees no key, without a sink
    grad_lse[..., 5] = torch.nan
    delta = torch.full_like(lse, 7.0)
    tiles = batch * 2 if offsets is None else total // 32 + batch
    workspace = torch.empty(2, heads, tiles * 32)
    given = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    def address(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())

    library.preprocess(
        *map(address, (out, grad_out, lse, grad_lse if with_grad_lse else None, delta, given)),
        *(batch, seqlen, total, heads, head_dim),
        *map(address, workspace),
    )
    expected = (out.float() * grad_out.float()).sum(-1).transpose(-1, -2)
    if with_grad_lse:
        expected = expected - grad_lse
    expected = expected.masked_fill(lse == -torch.inf, 0.0)
    inside = slice(None) if offsets is None else slice(offsets[0], offsets[-1])
    torch.testing.assert_close(delta[..., inside], expected[..., inside])
    if offsets is not None:
        assert (delta[:, : offsets[0]] == 7).all()
        assert (delta[:, offsets[-1] :] == 7).all()


def test_the_gradient_skips_rows_without_a_sink() -> None:
    sinks = torch.tensor([0.5, -torch.inf])
    lse = torch.tensor([[1.0, -torch.inf], [2.0, -torch.inf]])
    delta = torch.tensor([[3.0, torch.nan], [4.0, torch.nan]])
    found = gradient(sinks, lse, delta)
    torch.testing.assert_close(found, torch.tensor([-3.0 * float(torch.tensor(-0.5).exp()), -0.0]))
