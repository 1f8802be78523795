"""merge_states under `torch.vmap`: the mapped dimension becomes part of the batch."""

from __future__ import annotations

from typing import Any

import torch


def forward_batched(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The batching rule of merge_states_fwd."""
    outs, lses, stacked, layout, backend = arguments
    fold = _Fold(info.batch_size, stacked, outs[0], in_dims[0][0])
    out, lse = torch.ops.flashvar.merge_states_fwd.default(
        [fold.part(x, dim) for x, dim in zip(outs, in_dims[0], strict=True)],
        [fold.part(x, dim) for x, dim in zip(lses, in_dims[1], strict=True)],
        *(stacked, layout, backend),
    )
    return (fold.unfold(out, 0), fold.unfold(lse, 0)), (0, 0)


def backward_batched(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The batching rule of merge_states_bwd."""
    grad_out, grad_lse, outs, lses, stacked, *options = arguments
    fold = _Fold(info.batch_size, stacked, outs[0], in_dims[2][0])
    of_outs, of_lses = torch.ops.flashvar.merge_states_bwd.default(
        fold.whole(grad_out, in_dims[0]),
        fold.whole(grad_lse, in_dims[1]),
        [fold.part(x, dim) for x, dim in zip(outs, in_dims[2], strict=True)],
        [fold.part(x, dim) for x, dim in zip(lses, in_dims[3], strict=True)],
        *(stacked, *options),
    )
    return (fold.unfold(of_outs, 1), fold.unfold(of_lses, 1)), (1, 1)


class _Fold:
    """How a mapped dimension goes into the batch. Packed tensors have none: it becomes theirs."""

    def __init__(self, size: int, stacked: bool, out: torch.Tensor, dim: int | None) -> None:
        self.size = size
        self.front = 1 if stacked else 0
        shape = list(out.shape)
        if dim is not None:
            del shape[dim]
        self.packed = len(shape) - self.front == 3
        self.batch = 1 if self.packed else shape[self.front]

    def part(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        """An argument that has the parts in front where they are stacked."""
        return self._folded(tensor, dim, self.front)

    def whole(self, tensor: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        """An argument without parts."""
        return None if tensor is None else self._folded(tensor, dim, 0)

    def _folded(self, tensor: torch.Tensor, dim: int | None, into: int) -> torch.Tensor:
        if dim is None:
            tensor = tensor.unsqueeze(into)
            sizes = list(tensor.shape)
            sizes[into] = self.size
            tensor = tensor.expand(sizes)
        else:
            tensor = tensor.movedim(dim, into)
        return tensor if self.packed else tensor.flatten(into, into + 1)

    def unfold(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A result with the mapped dimension split off dimension `dim`."""
        return tensor if self.packed else tensor.unflatten(dim, (self.size, self.batch))
