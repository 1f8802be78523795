"""Call one backend, and be sure that it and nothing else answered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from oracle import Call, assert_right

import flashvar
from flashvar import registry
from flashvar.ops.attention_inputs import DTYPES
from flashvar.ops.attention_plan import plan
from flashvar.variant import Architecture
from flashvar.verdicts import Verdict


def expected_architecture() -> str:
    """The binary that has to serve: the forced one, else the one made for this device."""
    forced = os.environ.get("FLASHVAR_FORCE_ARCH")
    if forced:
        return Architecture.parse(forced).name
    return Architecture(*torch.cuda.get_device_capability()).name


def skip_unless_compiled(backend: str, dtype: torch.dtype, head_dim: int) -> None:
    """Skip what a binary of a subset of head dims, or no binary at all, cannot serve.

    A binary that somebody pointed at is not optional: then its absence is a failure.
    """
    if backend != "cuda":
        return
    binaries = {one.architecture.name: one for one in registry.installed().binaries}
    wanted = expected_architecture()
    if wanted not in binaries:
        named = [name for name in ("FLASHVAR_FORCE_ARCH", "FLASHVAR_LIB_DIR") if name in os.environ]
        assert not named, f"{named[0]} is set, yet there is no binary for {wanted}"
        pytest.skip(f"no binary for {wanted} is installed")
    rows = binaries[wanted].manifest.kernels
    dims = [row.head_dim for row in rows if row.dtype == DTYPES[dtype] and row.head_dim]
    enough = [dim for dim in dims if dim >= head_dim]
    if not enough or min(enough) > max(64, 2 * head_dim):
        pytest.skip(f"the binary holds head dims {sorted(dims)} for {DTYPES[dtype]}")


def assert_served_by(backend: str, verdict: Verdict) -> None:
    """The decision that the call went by names this backend and, for cuda, the right binary."""
    assert verdict.backend == backend
    if backend == "cuda":
        assert verdict.binary is not None
        assert verdict.binary.architecture.name == expected_architecture()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN inside, so an element that nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def attend(call: Call, backend: str, layout: str = "bshd") -> tuple[torch.Tensor, torch.Tensor]:
    """Out [batch, sequence, heads, head_dim] and log-sum-exp from `backend`, checked to be it."""
    skip_unless_compiled(backend, call.q.dtype, call.q.shape[-1])
    tensors = (call.q, call.k, call.v)
    if layout == "bhsd":
        tensors = tuple(tensor.transpose(1, 2) for tensor in tensors)
    with poisoned_memory():
        out, lse = flashvar.attention(
            *tensors,
            causal=call.causal,
            scale=call.scale,
            return_lse=True,
            layout=layout,
            backend=backend,
        )
    assert out.is_contiguous()
    made = plan(*tensors, call.causal, call.scale, layout, backend)
    assert_served_by(backend, made.verdict)
    return (out.transpose(1, 2) if layout == "bhsd" else out), lse


def check(call: Call, backend: str, layout: str = "bshd") -> None:
    """Run a call on `backend` and compare all of it with the oracle."""
    assert_right(call, *attend(call, backend, layout))
