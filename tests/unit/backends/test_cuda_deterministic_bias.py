"""The gradient of a bias through a binary: where it is written, and who adds up what it shares."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from abi_structs import declared

from flashvar.backends.cuda import attention as cuda
from flashvar.binaries import loader
from flashvar.binaries.registry import Binary
from flashvar.ops.attention.problem import Gradients, Inputs, Options
from flashvar.ops.attention.validate import inspect_backward
from flashvar.selection.candidates import CandidateResult

PARAMS = declared("flashvar_attention_bwd_params")
CHOSEN = CandidateResult("cuda", "cuda", True, "", binary=cast("Binary", object()))
BATCH, QUERIES, KEYS, HEADS, DIM = 2, 3, 5, 4, 16
SCORES = (BATCH, HEADS, QUERIES, KEYS)


def add_to_every_score(packed: bytes) -> tuple[int, int, int]:
    """Adds 0, 1, 2, ... to the gradient of the bias, as kernels add the gradients of scores.

    Returns its strides.
    """
    found = PARAMS.from_buffer_copy(packed).grad_bias
    values = torch.arange(float(torch.Size(SCORES).numel())).view(SCORES)
    for batch, head, query, key in torch.ones(SCORES).nonzero().tolist():
        place = batch * found.batch_stride + query * found.seq_stride + head * found.head_stride
        address = found.data + 4 * (place + key)
        ctypes.c_float.from_address(address).value += values[batch, head, query, key].item()
    return found.batch_stride, found.seq_stride, found.head_stride


@pytest.fixture
def strides(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of the gradients of biases that the binary is given."""
    found: list[tuple[int, int, int]] = []

    def function(name: str) -> Any:
        launch = lambda packed: found.append(add_to_every_score(packed))  # noqa: E731
        return SimpleNamespace(launch=launch, workspace=lambda packed: 0)

    monkeypatch.setattr(loader, "load", lambda binary: SimpleNamespace(function=function))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return found


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize(
    "shape",
    [SCORES, (1, *SCORES[1:]), (BATCH, 1, QUERIES, KEYS), (1, 1, QUERIES, KEYS)],
    ids=str,
)
def test_what_a_bias_shares_is_added_up(
    shape: tuple[int, ...], deterministic: bool, strides: list[tuple[int, int, int]]
) -> None:
    q, k = (torch.zeros(BATCH, rows, HEADS, DIM).half() for rows in (QUERIES, KEYS))
    inputs = Inputs(q, k, k, bias=torch.zeros(shape).half())
    problem = inspect_backward(inputs, Options(deterministic=deterministic), q, True)
    problem = replace(problem, forward=replace(problem.forward, device=0))
    grads = Gradients(*map(torch.empty_like, (q, k, k)), torch.ones(shape))
    launch = cuda.prepare_backward(problem, CHOSEN)
    launch(inputs, q, torch.zeros(BATCH, HEADS, QUERIES), q, None, grads)
    values = torch.arange(float(torch.Size(SCORES).numel())).view(SCORES)
    assert grads.bias is not None
    assert torch.equal(grads.bias, 1 + values.sum_to_size(shape))
    in_order = all(stride > 0 for stride in strides[0])
    assert in_order is (deterministic or shape == SCORES)
