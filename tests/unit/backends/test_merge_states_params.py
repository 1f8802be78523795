"""The structs of merge_states that Python packs for a binary, and how many parts it may list."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from abi_structs import HEADER, declared

from flashvar.backends.cuda import merge_states as cuda
from flashvar.binaries import loader
from flashvar.binaries.registry import Binary
from flashvar.errors import BackendUnavailableError
from flashvar.ops.merge_states.problem import Parts
from flashvar.selection.candidates import CandidateResult

CHOSEN = CandidateResult("cuda", "cuda", True, "", binary=cast("Binary", object()))
FWD, BWD = "flashvar_merge_states_fwd_params", "flashvar_merge_states_bwd_params"


class Call:
    """One struct as the library found it, with the addresses that it points to."""

    def __init__(self, name: str, packed: bytes) -> None:
        structure = declared(name)
        assert len(packed) == ctypes.sizeof(structure)
        self.params: Any = structure.from_buffer_copy(packed)
        problem = self.params.problem
        self.outs = self._addresses(problem.out_parts, problem.parts)
        self.lses = self._addresses(problem.lse_parts, problem.parts)

    @staticmethod
    def _addresses(where: int, count: int) -> list[int] | None:
        return list((ctypes.c_uint64 * count).from_address(where)) if where else None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Collects what is handed to a library that does nothing; addresses are read at once."""
    collected: list[Call] = []

    def function(name: str) -> Any:
        def launch(packed: bytes) -> None:
            collected.append(Call(f"flashvar_{name}_params", packed))

        return SimpleNamespace(launch=launch, explain=lambda packed: f"{len(packed)} bytes")

    library = SimpleNamespace(function=function)
    monkeypatch.setattr(loader, "load", lambda binary: library)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False
    )
    real = cuda.function_of
    monkeypatch.setattr(cuda, "function_of", lambda name, chosen, device: real(name, chosen, 3))
    return collected


def made(parts: int, stacked: bool = False) -> Parts:
    """[2, 5, 4, 16] of wider rows, and [2, 4, 5]."""
    outs = torch.empty(parts, 2, 5, 4, 24, dtype=torch.half)[..., :16]
    lses = torch.empty(parts, 2, 4, 5)
    if stacked:
        return Parts((outs,), (lses,), True)
    return Parts(tuple(outs.unbind()), tuple(lses.unbind()), False)


def forward(chosen: CandidateResult, *given: Any) -> None:
    cuda.prepare_forward(chosen, *given)(*given)


def tensor(found: Any) -> tuple[int, ...]:
    return (found.data, found.batch_stride, found.seq_stride, found.head_stride)


@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
def test_forward(stacked: bool, calls: list[Call]) -> None:
    parts = made(3, stacked)
    out = torch.empty(2, 4, 5, 16, dtype=torch.half).transpose(1, 2)
    lse = torch.empty(2, 4, 5)
    forward(CHOSEN, parts, out, lse)
    (call,) = calls
    params = call.params
    assert (params.call.abi_version, params.call.device, params.call.stream) == (2, 3, 1003)
    assert params.call.struct_size == ctypes.sizeof(declared(FWD))
    assert tensor(params.out) == (out.data_ptr(), 320, 16, 80)
    assert params.lse == lse.data_ptr()
    problem = params.problem
    sizes = (problem.batch, problem.seqlen, problem.heads, problem.head_dim)
    assert (*sizes, problem.dtype, problem.parts) == (2, 5, 4, 16, 1, 3)
    first_out, first_lse = parts.outs[0], parts.lses[0]
    assert tensor(problem.outs) == (first_out.data_ptr(), 480, 96, 24)
    assert tensor(problem.lses) == (first_lse.data_ptr(), 20, 1, 5)
    if stacked:
        assert (problem.outs_part_stride, problem.lses_part_stride) == (960, 40)
        assert call.outs is call.lses is None
    else:
        assert call.outs == [x.data_ptr() for x in parts.outs]
        assert call.lses == [x.data_ptr() for x in parts.lses]


def test_backward(calls: list[Call]) -> None:
    parts = made(2)
    grad_out = torch.empty(2, 5, 4, 16, dtype=torch.half)
    grads = torch.empty(2, 2, 5, 4, 16, dtype=torch.half)
    grad_lse, grad_lses = torch.empty(2, 4, 5), torch.empty(2, 2, 4, 5)
    for given in (grad_lse, None):
        given_all = (parts, grad_out, given, grads, grad_lses)
        cuda.prepare_backward(CHOSEN, *given_all, 0)(*given_all)
    with_lse, without = (call.params for call in calls)
    assert tensor(with_lse.grad_out) == (grad_out.data_ptr(), 320, 64, 16)
    assert tensor(with_lse.grad_outs) == (grads.data_ptr(), 320, 64, 16)
    assert with_lse.grad_outs_part_stride == 640
    assert (with_lse.grad_lse, without.grad_lse) == (grad_lse.data_ptr(), 0)
    assert with_lse.grad_lses == grad_lses.data_ptr()
    assert calls[0].outs == [x.data_ptr() for x in parts.outs]


def test_more_parts_than_the_kernels_hold_are_stacked(calls: list[Call]) -> None:
    most = int(re.findall(r"FLASHVAR_MERGE_STATES_MAX_ADDRESSES (\d+)", HEADER)[0])
    result = torch.empty(2, 5, 4, 16, dtype=torch.half), torch.empty(2, 4, 5)
    for parts in (most, most + 1):
        forward(CHOSEN, made(parts), *result)
    listed, stacked = calls
    assert listed.outs is not None
    assert len(listed.outs) == most
    assert stacked.outs is None
    assert stacked.params.problem.parts == most + 1
    assert stacked.params.problem.outs_part_stride == 640


def test_strides_of_one_entry_are_zero(calls: list[Call]) -> None:
    """They say nothing, and must not make rows look unaligned."""
    out = torch.empty(1, 5, 1, 16, dtype=torch.half).as_strided((1, 5, 1, 16), (7, 16, 3, 1))
    parts = Parts((out, out), (torch.empty(1, 1, 5),) * 2, False)
    forward(CHOSEN, parts, out, torch.empty(1, 1, 5))
    assert tensor(calls[0].params.problem.outs)[1:] == (0, 16, 0)


def test_the_binary_explains_a_call(calls: list[Call]) -> None:
    result = torch.empty(2, 5, 4, 16, dtype=torch.half), torch.empty(2, 4, 5)
    assert cuda.explain_forward(CHOSEN, made(2), *result) == "208 bytes"
    assert calls == []


def test_no_binary_no_launch() -> None:
    result = torch.empty(2, 5, 4, 16, dtype=torch.half), torch.empty(2, 4, 5)
    nothing = CandidateResult("triton", "triton", True, "")
    with pytest.raises(BackendUnavailableError, match="through an installed binary, found triton"):
        forward(nothing, made(2), *result)
