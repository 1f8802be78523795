"""A binary of flashvar whose device is the host's memory.

It knows what a kernel knows: the struct that it is handed, as `attention.h` declares it, and what
lies at its addresses. Tensors that Python holds do not reach it.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from abi_structs import declared

from flashvar.backends.cuda import attention as cuda
from flashvar.backends.reference.attention import backward, forward
from flashvar.binaries.registry import Binary
from flashvar.errors import FlashvarError
from flashvar.ops import backend_choice
from flashvar.ops.attention.problem import Gradients, Inputs, Options, Problem
from flashvar.ops.attention.spec import BACKWARD, FORWARD
from flashvar.ops.attention.validate import inspect
from flashvar.selection.candidates import CandidateResult
from flashvar.selection.request import Request

_DTYPES = (torch.bfloat16, torch.float16)
_SINKS = (*_DTYPES, torch.float32)
_CAUSAL, _LEFT, _RIGHT, _DETERMINISTIC = 1, 2, 4, 8
_REFERENCE = CandidateResult("reference", "reference", True, "")
_BINARY = CandidateResult("cuda", "cuda", True, "", binary=cast("Binary", object()))


class FakeBinary:
    """Forward and backward of attention; `calls` says what it was asked for beside numbers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def attention_fwd(self, packed: bytes) -> None:
        given = declared("flashvar_attention_fwd_params").from_buffer_copy(packed)
        problem, inputs, out, lse = self._read("forward", given)
        forward.attention_fwd(problem, inputs, out, lse)

    def attention_bwd_workspace(self, packed: bytes) -> int:
        return 0

    def attention_bwd(self, packed: bytes) -> None:
        given: Any = declared("flashvar_attention_bwd_params").from_buffer_copy(packed)
        problem, inputs, out, lse = self._read("backward", given)
        assert lse is not None
        rows = _rows(given.problem, "q", given.problem.heads_q)
        grads = Gradients(
            *(
                _view(getattr(given, f"grad_{name}"), x.shape, x.dtype)
                for name, x in zip("qkv", inputs[:3], strict=True)
            ),
            _grad_bias(given),
        )
        grad_out = _view(given.grad_out, (*rows, problem.head_dim_v), out.dtype)
        grad_lse = _memory(given.grad_lse, lse.shape, lse.stride(), lse.dtype)
        delta = _memory(given.problem.delta, lse.shape, lse.stride(), lse.dtype)
        backward.attention_bwd(problem, inputs, out, lse, grad_out, grad_lse, grads, delta)

    def _read(
        self, what: str, given: Any
    ) -> tuple[Problem, Inputs, torch.Tensor, torch.Tensor | None]:
        asked = given.problem
        self.calls.append(what + " deterministic" * bool(asked.flags & _DETERMINISTIC))
        dtype = _DTYPES[asked.dtype]
        rows_q = _rows(asked, "q", asked.heads_q)
        rows_k = _rows(asked, "k", asked.heads_kv)
        batch, bias_dtype = asked.batch, torch.float32 if asked.bias_dtype else dtype
        scores = (batch, asked.heads_q, asked.seqlen_q, asked.seqlen_k)
        bias = asked.bias
        strides = (bias.batch_stride, bias.head_stride, bias.seq_stride, 1)
        inputs = Inputs(
            _view(given.q, (*rows_q, asked.head_dim), dtype),
            _view(given.k, (*rows_k, asked.head_dim), dtype),
            _view(given.v, (*rows_k, asked.head_dim_v), dtype),
            _memory(bias.data, scores, strides, bias_dtype),
            _memory(asked.sinks, (asked.heads_q,), (1,), _SINKS[asked.sinks_dtype]),
            _memory(
                asked.alibi_slopes,
                (batch, asked.heads_q),
                (asked.alibi_batch_stride, 1),
                torch.float32,
            ),
            _memory(asked.rng, (2,), (1,), torch.int64),
            *(
                _memory(getattr(asked, name), (length,), (1,), torch.int32)
                for name, length in (
                    ("cu_seqlens_q", batch + 1),
                    ("cu_seqlens_k", batch + 1),
                    ("seqused_k", batch),
                )
            ),
        )
        packed = asked.cu_seqlens_q != 0
        shape = (asked.heads_q, asked.total_q) if packed else scores[:3]
        lse = _memory(given.lse, shape, torch.empty(shape, device="meta").stride(), torch.float32)
        out = _view(given.out, (*rows_q, asked.head_dim_v), dtype)
        try:
            problem = inspect(inputs, _options(asked))
        except FlashvarError as error:
            raise AssertionError("the struct describes no call") from error
        return problem, inputs, out, lse


def install(monkeypatch: pytest.MonkeyPatch) -> FakeBinary:
    """Let it serve CPU tensors of 16 bits, but for calls that name the reference."""
    binary = FakeBinary()

    def choose(request: Request, named: str) -> CandidateResult:
        return _REFERENCE if named == "reference" else _BINARY

    functions = {
        FORWARD: SimpleNamespace(launch=binary.attention_fwd, workspace=lambda packed: 0),
        BACKWARD: SimpleNamespace(
            launch=binary.attention_bwd, workspace=binary.attention_bwd_workspace
        ),
    }
    monkeypatch.setattr(backend_choice, "choose", choose)
    monkeypatch.setattr(cuda, "function_of", lambda name, chosen, device: (functions[name], 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return binary


def _options(asked: Any) -> Options:
    flags = asked.flags
    return Options(
        causal=bool(flags & _CAUSAL),
        scale=asked.scale,
        window_left=asked.window_left if flags & _LEFT else -1,
        window_right=asked.window_right if flags & _RIGHT else -1,
        softcap=asked.softcap,
        dropout_p=asked.dropout_p,
        max_seqlen_q=asked.seqlen_q,
        max_seqlen_k=asked.seqlen_k,
    )


def _rows(asked: Any, name: str, heads: int) -> tuple[int, ...]:
    if getattr(asked, f"cu_seqlens_{name}"):
        return getattr(asked, f"total_{name}"), heads
    return asked.batch, getattr(asked, f"seqlen_{name}"), heads


def _view(found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    strides = (found.batch_stride, found.seq_stride, found.head_stride, 1)
    view = _memory(found.data, shape, strides[-len(shape) :], dtype)
    assert view is not None, "a tensor at address 0"
    return view


def _grad_bias(given: Any) -> torch.Tensor | None:
    found, asked = given.grad_bias, given.problem
    batch = asked.batch if found.batch_stride else 1
    heads = asked.heads_q if found.head_stride else 1
    strides = (found.batch_stride, found.head_stride, found.seq_stride, 1)
    return _memory(
        found.data, (batch, heads, asked.seqlen_q, asked.seqlen_k), strides, torch.float32
    )


def _memory(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """What lies at an address; None at 0."""
    if address == 0:
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_ubyte * (reach * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)
