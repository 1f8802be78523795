"""Formulas of attention for `torch.utils.flop_counter`.

They count the matrix products over visible pairs of a query and a key: pairs that a causal mask or
a window hides do not count, and packed sequences count with their own lengths. A forward has two
products, a backward five (it recomputes the scores). Where lengths cannot be read, as with fake
tensors, packed sequences count as if all had the same length.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.ops.attention.problem import Inputs, Options, Problem
from flashvar.ops.attention.validate import inspect
from flashvar.ops.dispatch_modes import PLAIN, is_faking

_TENSORS: Final = len(Inputs._fields)


def forward_flops(*arguments: Any, **_: Any) -> int:
    """Operations of attention_fwd."""
    problem, pairs = _count(arguments)
    return 2 * pairs * problem.heads_q * (problem.head_dim + problem.head_dim_v)


def backward_flops(
    _grad_out: Any,
    _grad_lse: Any,
    _out: Any,
    _lse: Any,
    _wants_bias: Any,
    _wants_sinks: Any,
    *arguments: Any,
    **_: Any,
) -> int:
    """Operations of attention_bwd."""
    problem, pairs = _count(arguments)
    return 2 * pairs * problem.heads_q * (3 * problem.head_dim + 2 * problem.head_dim_v)


def visible_pairs(seqlen_q: int, seqlen_k: int, window_left: int, window_right: int) -> int:
    """How many pairs of a query and a key are visible; a window of -1 is unbounded."""
    diagonal = seqlen_k - seqlen_q
    upto = seqlen_q * seqlen_k
    if window_right >= 0:
        upto = _keys_upto(seqlen_q, seqlen_k, diagonal + window_right)
    if window_left < 0:
        return upto
    return max(0, upto - _keys_upto(seqlen_q, seqlen_k, diagonal - window_left - 1))


def _keys_upto(seqlen_q: int, seqlen_k: int, last: int) -> int:
    """The number of pairs of a query i and a key j with j <= i + last."""
    first = min(max(-last, 0), seqlen_q)  # the first query with any key
    full = min(max(seqlen_k - last - 1, first), seqlen_q)  # the first query with all keys
    growing = full - first
    return (
        growing * (first + last + 1) + growing * (growing - 1) // 2 + (seqlen_q - full) * seqlen_k
    )


def _count(arguments: tuple[Any, ...]) -> tuple[Problem, int]:
    inputs = Inputs._make(arguments[:_TENSORS])
    problem = inspect(inputs, Options._make(arguments[_TENSORS:])._replace(backend="reference"))
    lengths_q = _lengths(problem, inputs.cu_seqlens_q, problem.total_q, problem.seqlen_q)
    lengths_k = _lengths(problem, inputs.cu_seqlens_k, problem.total_k, problem.seqlen_k)
    used = inputs.seqused_k
    if used is not None and _readable(used):
        lengths_k = [min(a, b) for a, b in zip(lengths_k, used.tolist(), strict=True)]
    window = (problem.window_left, problem.window_right)
    pairs = sum(visible_pairs(q, k, *window) for q, k in zip(lengths_q, lengths_k, strict=True))
    return problem, pairs


def _lengths(
    problem: Problem, offsets: torch.Tensor | None, total: int | None, length: int
) -> list[int]:
    if offsets is None or total is None:
        return [length] * problem.batch
    if _readable(offsets):
        return [int(n) for n in offsets.diff().tolist()]
    return [total // max(problem.batch, 1)] * problem.batch


def _readable(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN and not tensor.is_meta and not is_faking()
