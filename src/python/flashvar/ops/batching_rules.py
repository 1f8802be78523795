"""Batching rules: a mapped dimension becomes part of one whose entries do not mix."""

from __future__ import annotations

from typing import Any

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.dispatch_modes import is_compiling, is_mapped


def fold(x: Any, dim: int | None, size: int, into: int) -> Any:
    """x with its mapped dimension `dim` merged into dimension `into`, as the outer factor.

    `into` does not count the mapped dimension. If dim is None, x is repeated `size` times.
    """
    if x is None:
        return None
    if dim is None:
        x = x.unsqueeze(into)
        x = x.expand(*x.shape[:into], size, *x.shape[into + 1 :])
    else:
        x = x.movedim(dim, into)
    return x.flatten(into, into + 1)


def unfold(x: torch.Tensor, size: int, dim: int, entry: int) -> torch.Tensor:
    """A result with the mapped dimension split off dimension `dim`, and before it.

    `entry` is the size of dimension `dim` without the mapped one; without entries x cannot tell.
    """
    return x.unflatten(dim, (size, entry))


def entry_size(x: torch.Tensor, mapped: int | None, dim: int) -> int:
    """The size of dimension `dim` of an argument, which does not count the mapped one."""
    size: int = x.shape[dim if mapped is None or dim < mapped else dim + 1]
    return size


def check_same_offsets(dim: int | None, name: str) -> None:
    """Refuse cu_seqlens with a mapped dimension. `name`: a tensor of the call, for the message."""
    if dim is not None:
        raise InvalidInputError(
            "cu_seqlens must be the same for all under torch.vmap, found a mapped one: pack all "
            f"sequences into one {name}"
        )


def check_unmapped(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor that torch.vmap maps, at any depth of transforms."""
    if not is_compiling() and is_mapped(x):
        raise InvalidInputError(
            f"{name} must be the same for all under torch.vmap, found a mapped one: put the "
            "mapped dimension into the batch, or loop over the calls"
        )


def mapped_update(function: str) -> InvalidInputError:
    """The refusal of torch.vmap over what writes states in place."""
    return InvalidInputError(
        f"{function} must have its sequences in the batch, found torch.vmap over it: pass them as "
        "one batch with their states"
    )
