"""Batching rules: a mapped dimension becomes part of one whose entries do not mix."""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.dispatch_modes import is_compiling

_is_transformed: Final = torch._C._functorch.is_functorch_wrapped_tensor


def fold(x: Any, dim: int | None, size: int, place: int) -> Any:
    """x whose dimension `place` has the entries of the mapped one too, which is the outer one.

    `place` counts without the mapped dimension `dim`. Without one, x is repeated `size` times.
    """
    if x is None:
        return None
    if dim is None:
        x = x.unsqueeze(place)
        x = x.expand(*x.shape[:place], size, *x.shape[place + 1 :])
    else:
        x = x.movedim(dim, place)
    return x.flatten(place, place + 1)


def unfold(x: torch.Tensor, size: int, place: int) -> torch.Tensor:
    """A result whose mapped dimension is at `place`, before the one that it was part of."""
    # Not -1: of no elements it says nothing.
    return x.unflatten(place, (size, x.shape[place] // size))


def check_same_offsets(dim: int | None, name: str) -> None:
    """Refuse cu_seqlens of a mapped dimension beside a tensor that has a name."""
    if dim is not None:
        raise InvalidInputError(
            "cu_seqlens must be the same for all under torch.vmap, got a mapped one: pack all "
            f"sequences into one {name}"
        )


def check_unmapped(name: str, x: torch.Tensor) -> None:
    """Refuse a tensor that torch.vmap maps, at any depth of transforms."""
    inner = x
    while not is_compiling() and _is_transformed(inner):
        if torch._C._functorch.is_batchedtensor(inner):
            raise InvalidInputError(
                f"{name} must be the same for all under torch.vmap, got a mapped one: put the "
                "mapped dimension into the batch, or loop over the calls"
            )
        inner = torch._C._functorch.get_unwrapped(inner)


def mapped_update(function: str) -> InvalidInputError:
    """The refusal of torch.vmap over what writes states in place."""
    return InvalidInputError(
        f"{function} must have its sequences in the batch, got torch.vmap over it: pass them as "
        "one batch with their states"
    )
