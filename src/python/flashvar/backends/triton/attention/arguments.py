"""The arguments of the Triton kernels other than tensors, computed from a problem."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.reference.attention.dropout import kept_scale, threshold
from flashvar.backends.triton.attention import tiles
from flashvar.backends.triton.attention.fwd import STRIDE_UNIT

if TYPE_CHECKING:
    from flashvar.backends.triton.attention.tiles import Tile
    from flashvar.ops.attention.problem import BackwardProblem, BiasStrides, Problem, Strides

LOG2E: Final = math.log2(math.e)
# Smaller float32 numbers are subnormal; the device rounds them to 0, so such a scale is 0.
_SMALLEST: Final = float(torch.finfo(torch.float32).tiny)
_LARGEST: Final = float(torch.finfo(torch.float32).max)
# Elements of a 16-bit dtype in 16 bytes, the width of a vectorized load.
_LOAD_ELEMENTS: Final = STRIDE_UNIT.value
# Longer than every sequence, and small enough that sums with positions fit in 32 bits.
UNBOUNDED: Final = 1 << 30


def forward_arguments(problem: Problem, tile: Tile, kernel: Any) -> dict[str, Any]:
    """The arguments of the forward kernel except pointers, and its compile options."""
    # The online softmax needs a positive factor, so that the largest score stays the largest; q is
    # multiplied by the sign. Modified scores are scaled, with the sign, before the softmax.
    factor = problem.scale * LOG2E
    sign = 1
    if not _modified(problem):
        sign = 0 if abs(factor) < _SMALLEST else int(math.copysign(1.0, factor))
        factor = 1.0 if sign == 0 else abs(factor)
    arguments = {**_common(problem), "scale_log2": float32(factor), "SIGN": sign}
    return _kernel_arguments(arguments, tile, kernel)


def backward_arguments(backward: BackwardProblem, tile: Tile, kernel: Any) -> dict[str, Any]:
    """The arguments of a backward kernel except pointers, and its compile options."""
    problem = backward.forward
    bias = backward.grad_bias
    arguments = {
        **_common(problem),
        **_strides("grad_out", backward.grad_out),
        **_strides("grad_q", backward.grad_q),
        **_strides("grad_k", backward.grad_k),
        **_strides("grad_v", backward.grad_v),
        **bias_strides("grad_bias", bias),
        "bias_batches": problem.batch if bias is not None and bias.batch else 1,
        "bias_heads": problem.heads_q if bias is not None and bias.heads else 1,
        "scale": float32(problem.scale),
        "scale_log2": float32(problem.scale * LOG2E),
    }
    return _kernel_arguments(arguments, tile, kernel)


def _common(problem: Problem) -> dict[str, Any]:
    head, tail = tiles.split(problem.head_dim)
    head_v, tail_v = tiles.split(problem.head_dim_v)
    packed = problem.total_q is not None
    softcap = problem.softcap
    return {
        **_strides("q", problem.q),
        **_strides("k", problem.k),
        **_strides("v", problem.v),
        **_strides("out", problem.out),
        **bias_strides("bias", problem.bias),
        "lse_batch": 0 if packed else problem.heads_q * problem.seqlen_q,
        "lse_head": problem.total_q if packed else problem.seqlen_q,
        "slopes_batch": problem.alibi_batch_stride or 0,
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "group": problem.heads_q // problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "total_q": problem.total_q or 0,
        "total_k": problem.total_k or 0,
        "window_left": min(problem.window_left, UNBOUNDED),
        "window_right": min(problem.window_right, UNBOUNDED),
        "softcap_in": float32(2.0 * LOG2E * problem.scale / softcap) if softcap else 0.0,
        "softcap_out": float32(softcap * LOG2E),
        "dropout_threshold": _threshold_bits(problem.dropout_p),
        "dropout_scale": kept_scale(problem.dropout_p),
        "SOFTCAP": softcap != 0.0,
        "LEFT": problem.window_left >= 0,
        "RIGHT": problem.window_right >= 0,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "HEAD": head,
        "TAIL": tail,
        "HEAD_V": head_v,
        "TAIL_V": tail_v,
    }


def _threshold_bits(dropout_p: float) -> int:
    """The threshold, a uint32, as the int32 with the same bits."""
    bits = threshold(dropout_p)
    return bits - (1 << 32) if bits >> 31 else bits


def _modified(problem: Problem) -> bool:
    """Whether scores are more than scale * (q . k)."""
    return (
        problem.softcap != 0.0 or problem.bias is not None or problem.alibi_batch_stride is not None
    )


def float32(value: float) -> float:
    """The value, clamped to the range of float32; subnormal numbers become 0."""
    if abs(value) < _SMALLEST:
        return 0.0
    return max(-_LARGEST, min(value, _LARGEST))


def _kernel_arguments(arguments: dict[str, Any], tile: Tile, kernel: Any) -> dict[str, Any]:
    arguments = {**arguments, "BLOCK_Q": tile.block_q, "BLOCK_KV": tile.block_kv}
    selected = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    # enable_fp_fusion contracts a * b + c. Set explicitly: its default changes with Triton 3.10.
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return {**selected, **options}


def _strides(name: str, strides: Strides) -> dict[str, int]:
    """Strides by kernel argument, in units of STRIDE_UNIT elements."""
    axes = zip(("batch", "row", "head"), strides, strict=True)
    return {f"{name}_{axis}": stride // _LOAD_ELEMENTS for axis, stride in axes}


def bias_strides(name: str, strides: BiasStrides | None) -> dict[str, int]:
    """Strides of a bias by kernel argument, in elements."""
    axes = zip(("batch", "head", "query"), strides or (0, 0, 0), strict=True)
    return {f"{name}_{axis}": stride for axis, stride in axes}
