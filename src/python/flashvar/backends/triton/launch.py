"""How the Triton forward kernel is called for one problem."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.triton import tiles
from flashvar.backends.triton.attention_fwd import STRIDE_UNIT, attention_fwd_kernel
from flashvar.ops.attention_inputs import inspect
from flashvar.system import gather

if TYPE_CHECKING:
    from flashvar.backends import Launch
    from flashvar.ops.attention_inputs import Problem
    from flashvar.verdicts import Verdict

_LOG2E: Final = math.log2(math.e)
# Below this float32 is subnormal, which the device rounds to 0: the scale then is 0.
_SMALLEST: Final = float(torch.finfo(torch.float32).tiny)
_LARGEST: Final = float(torch.finfo(torch.float32).max)
# 16 bytes of a 16-bit dtype: what one memory instruction moves.
_WIDE: Final = STRIDE_UNIT.value
_WIDE_BYTES: Final = 2 * _WIDE
# What the interpreter, which has no device, pretends to be.
_NO_DEVICE: Final = ((8, 0), 48 * 1024)


def prepare_attention_fwd(problem: Problem, verdict: Verdict) -> Launch:
    """Choose the tile and freeze every argument but the tensors.

    The kernel reads rows in 16-byte pieces. Tensors that start or stride elsewhere are copied
    first: Triton 3.6 gives wrong addresses to narrow tiles of unaligned rows.
    """
    del verdict
    rows_aligned = all(stride % _WIDE == 0 for stride in _strides(problem).values())
    run = _launcher(problem) if rows_aligned else None

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if run is not None and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % _WIDE_BYTES == 0:
            run(q, k, v, out, lse)
            return
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
        copied = inspect(q, k, v, causal=problem.causal, scale=problem.scale, layout=problem.layout)
        _launcher(copied)(q, k, v, out, lse)

    return launch


def _launcher(problem: Problem) -> Launch:
    """The launch of a problem whose rows are aligned."""
    capability, shared_memory = _device(problem.device)
    tile = tiles.choose(capability, shared_memory, problem.head_dim)
    grid = (problem.batch * problem.heads_q * -(-problem.seqlen_q // tile.block_q),)
    arguments = kernel_arguments(problem, tile)
    device = problem.device

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        # Triton launches on the current device.
        elsewhere = device is not None and device != torch.cuda.current_device()
        with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
            attention_fwd_kernel[grid](q, k, v, out, lse, **arguments)

    return launch


def kernel_arguments(problem: Problem, tile: tiles.Tile) -> dict[str, Any]:
    """Everything that the kernel takes besides the five tensors."""
    factor = abs(problem.scale) * _LOG2E
    head, tail = tiles.split(problem.head_dim)
    return {
        **{name: stride // _WIDE for name, stride in _strides(problem).items()},
        "heads_q": problem.heads_q,
        "group": problem.heads_q // problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "scale_log2": 1.0 if factor < _SMALLEST else min(factor, _LARGEST),
        "SIGN": 0 if factor < _SMALLEST else int(math.copysign(1.0, problem.scale)),
        "CAUSAL": problem.causal,
        "HEAD_DIM": problem.head_dim,
        "HEAD": head,
        "TAIL": tail,
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _strides(problem: Problem) -> dict[str, int]:
    """By the kernel's names."""
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v, "out": problem.out}
    return {
        f"{name}_{axis}": stride
        for name, strides in tensors.items()
        for axis, stride in zip(("batch", "row", "head"), strides, strict=True)
    }


def _device(index: int | None) -> tuple[tuple[int, int], int]:
    device = None if index is None else gather().device(index)
    return _NO_DEVICE if device is None else (device.capability, device.shared_memory)
