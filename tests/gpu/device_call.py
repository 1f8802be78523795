"""Call one backend, forward or backward, and be sure that it and nothing else answered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import Call, assert_gradients_right, assert_right

import flashvar
from flashvar.binaries import registry
from flashvar.binaries.kinds import Architecture, BinaryKind
from flashvar.binaries.manifest import KernelRow
from flashvar.machine import driver
from flashvar.ops.attention.spec import HEAD_DIM
from flashvar.selection.candidates import CandidateResult
from flashvar.selection.request import Request
from flashvar.selection.resolve import choose

# The CPU only in a rehearsal (conftest.py).
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
OPS = ("attention_fwd", "attention_bwd")


def expected_architecture() -> str:
    """The binary that has to serve: the forced one, else the best of those that are installed."""
    forced = os.environ.get("FLASHVAR_FORCE_ARCH")
    if forced:
        return BinaryKind.parse(forced).name
    capability = torch.cuda.get_device_capability()
    kinds = [
        one.kind
        for one in registry.installed().binaries
        if one.architecture.runs_on(capability) and one.kind.runs_with(driver.cuda_version())
    ]
    return max(kinds, default=BinaryKind(Architecture(*capability))).name


def kernels_that_serve() -> tuple[KernelRow, ...]:
    """The kernels of the binary that has to serve; the test is skipped if it is not installed.

    A binary that somebody pointed at is not optional: then its absence is a failure.
    """
    binaries = {one.kind.name: one for one in registry.installed().binaries}
    wanted = expected_architecture()
    if wanted not in binaries:
        named = [name for name in ("FLASHVAR_FORCE_ARCH", "FLASHVAR_LIB_DIR") if name in os.environ]
        assert not named, f"{named[0]} is set, yet there is no binary for {wanted}"
        pytest.skip(f"no binary for {wanted} is installed")
    return tuple(binaries[wanted].manifest.kernels)


def skip_without(op: str) -> None:
    """Skip if the binary that has to serve is a build without the op."""
    if not any(row.function.startswith(op) for row in kernels_that_serve()):
        pytest.skip(f"the binary for {expected_architecture()} is a build without {op}")


def skip_unless_compiled(
    backend: str, dtype: torch.dtype, head_dim: int, op: str = "attention_fwd"
) -> None:
    """Skip what a binary of a subset of head dims, or no binary at all, cannot serve."""
    if backend != "cuda":
        return
    rows = [row for row in kernels_that_serve() if row.function == op]
    # A kernel of two head dims serves calls with no more than either.
    smaller = [min(dims_of(row)) for row in rows if row.dtype == DTYPES[dtype]]
    enough = [dim for dim in smaller if dim >= head_dim]
    if not enough or min(enough) > max(64, 2 * head_dim):
        pytest.skip(f"{op}: the binary holds head dims {sorted(smaller)} for {DTYPES[dtype]}")


def dims_of(row: KernelRow) -> tuple[int, ...]:
    """The head dims that a kernel is compiled for."""
    held = HEAD_DIM.value(row.values[HEAD_DIM.name])
    assert not isinstance(held, str)
    return held


def assert_served_by(backend: str, result: CandidateResult) -> None:
    """The decision that a call goes by names this backend and, for cuda, the right binary."""
    assert result.backend == backend
    if backend == "cuda":
        assert result.binary is not None
        assert result.binary.kind.name == expected_architecture()


def require(call: Call, backend: str, op: str = "attention_fwd") -> None:
    """Skip what is not compiled; else this backend is the one that serves the call."""
    # Head dims between multiples of 8 are padded before a kernel is asked for.
    head_dim, head_dim_v = (-(-tensor.shape[-1] // 8) * 8 for tensor in (call.q, call.v))
    skip_unless_compiled(backend, call.q.dtype, max(head_dim, head_dim_v), op)
    if backend == "reference":
        return
    request = Request.of(
        op, DTYPES[call.q.dtype], call.q.get_device(), head_dim=(head_dim, head_dim_v)
    )
    assert_served_by(backend, choose(request, backend))


@contextmanager
def poisoned_memory(call: Call, deterministic: bool) -> Iterator[None]:
    """New tensors are full of NaN inside, so an element that nobody writes is seen.

    Torch does it in its deterministic mode, which also makes a backward deterministic. Otherwise
    freed blocks of the sizes that will be asked for are: the allocator hands them out next.
    """
    if deterministic:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
        return
    shapes = [call.q.shape, call.k.shape, call.v.shape, call.out_shape, call.q.shape[:-1]]
    dtypes = (call.q.dtype, torch.float32)
    blocks = [
        torch.full(shape, torch.nan, dtype=dtype, device=call.q.device)
        for shape in shapes
        for dtype in dtypes
        for _ in range(2)
        if shape.numel() < 1 << 26
    ]
    del blocks
    yield


def options(call: Call, max_seqlen: int | None = None) -> dict[str, Any]:
    """The keywords of a call, of `attention` or, where sequences are packed, `attention_varlen`."""
    given: dict[str, Any] = {
        "causal": call.causal,
        "scale": call.scale,
        "window_size": call.window,
        "softcap": call.softcap,
        "sinks": call.sinks,
        "alibi_slopes": call.alibi_slopes,
        "dropout_p": call.dropout_p,
        "rng_state": call.rng_state,
    }
    if call.cu_seqlens_q is None:
        return {**given, "bias": call.bias}
    longest_q = int(call.cu_seqlens_q.diff().amax())
    longest_k = (
        call.k.shape[1] if call.cu_seqlens_k is None else int(call.cu_seqlens_k.diff().amax())
    )
    return {
        **given,
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "seqused_k": call.seqused_k,
        "max_seqlen_q": longest_q if max_seqlen is None else max_seqlen,
        "max_seqlen_k": longest_k if max_seqlen is None else max_seqlen,
    }


def run(
    call: Call,
    backend: str,
    layout: str = "bshd",
    max_seqlen: int | None = None,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and log-sum-exp of the public function; out is [batch, sequence, heads, head_dim]."""
    keywords = options(call, max_seqlen)
    keywords |= {"return_lse": True, "backend": backend, "deterministic": deterministic}
    if call.cu_seqlens_q is not None:
        return flashvar.attention_varlen(call.q, call.k, call.v, **keywords)
    tensors = (call.q, call.k, call.v)
    if layout.startswith("bhsd"):
        tensors = tuple(tensor.transpose(1, 2) for tensor in tensors)
    out, lse = flashvar.attention(*tensors, layout=layout, **keywords)
    assert out.is_contiguous()
    return (out.transpose(1, 2) if layout.endswith("bhsd") else out), lse


def attend(
    call: Call, backend: str, layout: str = "bshd", max_seqlen: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and log-sum-exp from `backend`, checked to be it, in poisoned memory."""
    require(call, backend)
    with poisoned_memory(call, deterministic=True):
        out, lse = run(call, backend, layout, max_seqlen)
    if call.cu_seqlens_q is not None:
        _forget_rows_of_no_sequence(call.cu_seqlens_q, out, lse)
    return out, lse


def check(call: Call, backend: str, layout: str = "bshd", max_seqlen: int | None = None) -> None:
    """Run a call on `backend` and compare all of it with the oracle."""
    assert_right(call, *attend(call, backend, layout, max_seqlen))


def differentiate(
    call: Call,
    backend: str,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None = None,
    *,
    layout: str = "bshd",
    max_seqlen: int | None = None,
    deterministic: bool = False,
    wanted: tuple[str, ...] = ("q", "k", "v", "bias", "sinks"),
) -> dict[str, torch.Tensor]:
    """Gradients by input name from `backend`, checked to be it, in poisoned memory."""
    for op in OPS:
        require(call, backend, op)
    tensors = {name: getattr(call, name) for name in wanted if getattr(call, name) is not None}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    with poisoned_memory(call, deterministic):
        out, lse = run(replace_inputs(call, leaves), backend, layout, max_seqlen, deterministic)
        pairs = [(out, grad_out), (lse, grad_lse)]
        outputs, grads = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), grads)
    return dict(zip(leaves, found, strict=True))


def check_gradients(
    call: Call,
    backend: str,
    *,
    layout: str = "bshd",
    max_seqlen: int | None = None,
    deterministic: bool = False,
    lse_gradient: bool = False,
) -> None:
    """Differentiate a call on `backend` along random directions and compare with the oracle."""
    grad_out = torch.randn(call.out_shape, device=call.q.device).to(call.q.dtype)
    grad_lse = None
    if lse_gradient:
        dense = (call.q.shape[0], call.q.shape[2], call.q.shape[1])
        packed = (call.q.shape[1], call.q.shape[0])
        shape = dense if call.cu_seqlens_q is None else packed
        grad_lse = torch.randn(shape, device=call.q.device)
    if call.cu_seqlens_q is not None:
        # What lies outside of every sequence is nobody's business.
        _forget_rows_of_no_sequence(call.cu_seqlens_q, grad_out, grad_lse, torch.nan)
    found = differentiate(
        call,
        backend,
        grad_out,
        grad_lse,
        layout=layout,
        max_seqlen=max_seqlen,
        deterministic=deterministic,
    )
    assert_gradients_right(call, found, grad_out, grad_lse)


def replace_inputs(call: Call, tensors: dict[str, torch.Tensor]) -> Call:
    """The same call on other tensors."""
    return Call(**{**vars(call), **tensors})


def _forget_rows_of_no_sequence(
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    value: float | None = None,
) -> None:
    """Packed rows before the first and after the last sequence become the oracle's, or `value`."""
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    for rows in (slice(0, first), slice(last, None)):
        out[rows] = 0.0 if value is None else value
        if lse is not None:
            lse[:, rows] = -torch.inf if value is None else value
