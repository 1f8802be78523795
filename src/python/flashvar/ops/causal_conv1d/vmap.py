"""causal_conv1d under `torch.vmap`: the mapped dimension becomes channels, which do not mix."""

from __future__ import annotations

from typing import Any

import torch

from flashvar.ops.batching_rules import check_same_offsets, entry_size, fold, mapped_update, unfold


def forward_batched(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The batching rule of causal_conv1d_fwd."""
    x, weight, bias, residual, state, cu_seqlens, silu, columns, layout, backend = arguments
    check_same_offsets(in_dims[5], "x")
    fold = _Fold(info.batch_size, layout, entry_size(weight, in_dims[1], 0))
    y, final_state = torch.ops.flashvar.causal_conv1d_fwd.default(
        fold.tokens(x, in_dims[0]),
        fold.folded(weight, in_dims[1], 0),
        fold.folded(bias, in_dims[2], 0),
        fold.tokens(residual, in_dims[3]),
        fold.folded(state, in_dims[4], 1),
        *(cu_seqlens, silu, columns, layout, backend),
    )
    return (fold.unfold(y, fold.channels), fold.unfold(final_state, 1)), (0, 0)


def backward_batched(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The batching rule of causal_conv1d_bwd."""
    grad_y, grad_final, x, weight, bias, state, cu_seqlens, silu, layout, backend = arguments
    check_same_offsets(in_dims[6], "x")
    fold = _Fold(info.batch_size, layout, entry_size(weight, in_dims[3], 0))
    of_x, of_weight, of_bias, of_state = torch.ops.flashvar.causal_conv1d_bwd.default(
        fold.tokens(grad_y, in_dims[0]),
        fold.folded(grad_final, in_dims[1], 1),
        fold.tokens(x, in_dims[2]),
        fold.folded(weight, in_dims[3], 0),
        fold.folded(bias, in_dims[4], 0),
        fold.folded(state, in_dims[5], 1),
        *(cu_seqlens, silu, layout, backend),
    )
    found = (
        fold.unfold(of_x, fold.channels),
        fold.unfold(of_weight, 0),
        None if bias is None else fold.unfold(of_bias, 0),
        None if state is None else fold.unfold(of_state, 1),
    )
    empty = of_x.new_empty(0)
    dims = tuple(None if one is None else 0 for one in found)
    return tuple(empty.clone() if one is None else one for one in found), dims


def update_batched(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """Refuses: states are written in place."""
    raise mapped_update("causal_conv1d_update")


class _Fold:
    """Merges a mapped dimension into the channels, as the outer factor."""

    def __init__(self, size: int, layout: str, dim: int) -> None:
        self.size = size
        self.dim = dim  # the number of channels of an entry
        self.channels = -1 if layout == "btd" else -2

    def tokens(self, x: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        """x, or a tensor of its shape, with the mapped dimension merged into the channels."""
        if x is None:
            return None
        return self.folded(x, dim, x.dim() - (dim is not None) + self.channels)

    def folded(self, x: torch.Tensor | None, dim: int | None, channels: int) -> torch.Tensor | None:
        """A tensor whose channels are dimension `channels`, with the mapped dimension merged."""
        return fold(x, dim, self.size, channels)

    def unfold(self, x: torch.Tensor, channels: int) -> torch.Tensor:
        """A result with the mapped dimension in front."""
        channels %= x.dim()
        return unfold(x, self.size, channels, self.dim).movedim(channels, 0)
