"""Sharding rules of merge_states for torch's DTensor.

Rows are independent. Tensors that are sharded over the batch, the sequence or the heads, or over
packed rows, are merged where they are; other placements are gathered first, as for every op.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flashvar.ops.merge_states.inputs import output_layout
from flashvar.ops.sharding import register, replicate, shard


def register_sharding_rules() -> None:
    """Register the rules with DTensor, once it is imported."""
    ops = torch.ops.flashvar
    register({ops.merge_states_fwd.default: _forward, ops.merge_states_bwd.default: _backward})


# torch.compile calls the function at trace time, instead of tracing it.
register_sharding_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forward(outs: Any, lses: Any, stacked: bool, layout: str, *rest: Any) -> list[Any]:
    options = [None] * (2 + len(rest))
    return [
        (
            [_at(of_result, 0), _at(of_lse, 0)],
            [*_parts(outs, of_out, stacked), *_parts(lses, of_lse, stacked), *options],
        )
        for of_out, of_lse, of_result in _dimensions(outs, stacked, layout)
    ]


def _backward(
    grad_out: Any, grad_lse: Any, outs: Any, lses: Any, stacked: bool, layout: str, *rest: Any
) -> list[Any]:
    options = [None] * (2 + len(rest))
    return [
        (
            [_at(of_out, 1), _at(of_lse, 1)],
            [
                None if grad_out is None else _at(of_result, 0),
                None if grad_lse is None else _at(of_lse, 0),
                *_parts(outs, of_out, stacked),
                *_parts(lses, of_lse, stacked),
                *options,
            ],
        )
        for of_out, of_lse, of_result in _dimensions(outs, stacked, layout)
    ]


def _dimensions(
    outs: Any, stacked: bool, layout: str
) -> Iterator[tuple[int | None, int | None, int | None]]:
    """The same dimension of one out, of lse and of the result; None: all are whole."""
    yield None, None, None
    packed = len(outs[0].shape) - (1 if stacked else 0) == 3
    of_lse = "hs" if packed else "bhs"
    # "bhsd->bshd" is that of outs, then that of the result.
    names, result = ("shd", "shd") if packed else (layout[:4], output_layout(layout))
    for name in of_lse:
        yield names.index(name), of_lse.index(name), result.index(name)


def _parts(tensors: Any, dim: int | None, stacked: bool) -> list[Any]:
    return [_at(dim, 1 if stacked else 0)] * len(tensors)


def _at(dim: int | None, before: int) -> Any:
    """Sharded over a dimension that has others before it."""
    return replicate() if dim is None else shard(dim + before)
