"""How many floating-point operations a call counts for in `torch.utils.flop_counter`.

Those of the matrix products over the pairs of a query and a key that it sees: a causal mask or a
window counts for what it leaves over, packed sequences for their own lengths. A forward has two
products, a backward five (it computes the scores again). Where lengths cannot be read, as of fake
tensors, packed sequences count as if all had the same length.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flashvar.ops.attention.problem import Inputs, Options, Problem
from flashvar.ops.attention.validate import inspect

_TENSORS: Final = len(Inputs._fields)
_COUNTER: Final = "torch.utils.flop_counter"


def tell_flop_counters() -> None:
    """Make the formulas known to torch's counters, those that count already too.

    Called where a dispatch mode is active: importing the counter here would cost a program that
    never counts 0.1 s.
    """
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        return
    formulas = {
        torch.ops.flashvar.attention_fwd: forward_flops,
        torch.ops.flashvar.attention_bwd: backward_flops,
    }
    if torch.ops.flashvar.attention_fwd not in counter.flop_registry:
        for op, formula in formulas.items():
            counter.register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            for op in formulas:
                registry.setdefault(op, counter.flop_registry[op])


def forward_flops(*arguments: Any, **_: Any) -> int:
    """Of attention_fwd."""
    problem, pairs = _count(arguments)
    return 2 * pairs * problem.heads_q * (problem.head_dim + problem.head_dim_v)


def backward_flops(
    _grad_out: Any,
    _grad_lse: Any,
    _out: Any,
    _lse: Any,
    _wants_bias: Any,
    *arguments: Any,
    **_: Any,
) -> int:
    """Of attention_bwd."""
    problem, pairs = _count(arguments)
    return 2 * pairs * problem.heads_q * (3 * problem.head_dim + 2 * problem.head_dim_v)


def visible_pairs(seqlen_q: int, seqlen_k: int, window_left: int, window_right: int) -> int:
    """How many pairs of a query and a key are not masked; a side of -1 is unbounded."""
    diagonal = seqlen_k - seqlen_q
    upto = seqlen_q * seqlen_k
    if window_right >= 0:
        upto = _keys_upto(seqlen_q, seqlen_k, diagonal + window_right)
    if window_left < 0:
        return upto
    return max(0, upto - _keys_upto(seqlen_q, seqlen_k, diagonal - window_left - 1))


def _keys_upto(seqlen_q: int, seqlen_k: int, last: int) -> int:
    """The sum over queries i of how many keys j have j <= i + last."""
    first = min(max(-last, 0), seqlen_q)  # the first query with any
    full = min(max(seqlen_k - last - 1, first), seqlen_q)  # the first query with all
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
    return [total // problem.batch] * problem.batch


def _readable(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
