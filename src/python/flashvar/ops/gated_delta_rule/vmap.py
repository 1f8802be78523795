"""gated_delta_rule under `torch.vmap`: the mapped dimension becomes heads, which do not mix."""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.ops.batching_rules import check_same_offsets, entry_size, fold, mapped_update, unfold

# Dimensions of heads: in the tensors of a call, in the order of the schemas, and in states.
_HEAD_AXES: Final = (2, 2, 2, 2, 2, 0, 0)
_STATE_HEAD_AXIS: Final = 1
_TENSORS: Final = len(_HEAD_AXES)


def forward_batched(info: Any, in_dims: Any, state: Any, *arguments: Any) -> tuple[Any, Any]:
    """The batching rule of gated_delta_rule_fwd."""
    size = info.batch_size
    out, final_state = torch.ops.flashvar.gated_delta_rule_fwd.default(
        fold(state, in_dims[0], size, _STATE_HEAD_AXIS), *_folded(size, in_dims[1:], arguments)
    )
    heads = entry_size(arguments[2], in_dims[3], _HEAD_AXES[2])  # those of v
    out_dims = _HEAD_AXES[0], _STATE_HEAD_AXIS
    results = zip((out, final_state), out_dims, strict=True)
    return tuple(unfold(x, size, dim, heads) for x, dim in results), out_dims


def backward_batched(
    info: Any, in_dims: Any, grad_out: Any, grad_final: Any, state: Any, *arguments: Any
) -> tuple[Any, Any]:
    """The batching rule of gated_delta_rule_bwd."""
    size = info.batch_size
    grads = torch.ops.flashvar.gated_delta_rule_bwd.default(
        fold(grad_out, in_dims[0], size, _HEAD_AXES[0]),
        fold(grad_final, in_dims[1], size, _STATE_HEAD_AXIS),
        fold(state, in_dims[2], size, _STATE_HEAD_AXIS),
        *_folded(size, in_dims[3:], arguments),
    )
    given = (*arguments[:_TENSORS], state)
    dims = [
        None if x is None else axis
        for x, axis in zip(given, (*_HEAD_AXES, _STATE_HEAD_AXIS), strict=True)
    ]
    mapped = (*in_dims[3 : 3 + _TENSORS], in_dims[2])
    found = [
        grad if dim is None else unfold(grad, size, dim, entry_size(x, of_x, dim))
        for grad, x, of_x, dim in zip(grads, given, mapped, dims, strict=True)
    ]
    return tuple(found), tuple(dims)


def update_batched(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """Refuses: states are written in place."""
    raise mapped_update("gated_delta_rule_update")


def _folded(size: int, in_dims: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    check_same_offsets(in_dims[_TENSORS], "q")
    folded = [
        fold(x, dim, size, axis)
        for x, dim, axis in zip(arguments, in_dims, _HEAD_AXES, strict=False)
    ]
    return (*folded, *arguments[_TENSORS:])
