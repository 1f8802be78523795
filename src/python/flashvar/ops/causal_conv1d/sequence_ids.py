"""Packed sequences that are named for each token, as causal-conv1d's `seq_idx` does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.ops.arguments import check_device, check_strided
from flashvar.ops.autocast import without_promotion
from flashvar.ops.batching_rules import check_unmapped
from flashvar.ops.dispatch_modes import as_list, can_be_read
from flashvar.ops.sequences import check_cu_seqlens, check_integers, check_offsets
from flashvar.ops.unknown_sizes import differ


def check_seq_idx(x: torch.Tensor, seq_idx: Any, layout: str, others: dict[str, Any]) -> None:
    """Refuse invalid sequence ids, and arguments that cannot be combined with them."""
    check_strided("seq_idx", seq_idx)
    check_unmapped("seq_idx", seq_idx)
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InvalidInputError(
            f"seq_idx must come without {', '.join(others)}, found {given[0]} too: for final "
            "states, pass cu_seqlens instead of seq_idx"
        )
    rows = tuple(x.shape[:2] if layout == "btd" else x.shape[::2])
    if x.dim() != 3 or differ(seq_idx.shape, rows):
        raise ShapeError(
            f"seq_idx must be [batch, seqlen] with x of three dimensions, found "
            f"{tuple(seq_idx.shape)} with {tuple(x.shape)}: name the sequence of each token, and "
            "pass the columns of a cache in front of them as initial_state"
        )
    check_integers("seq_idx", seq_idx)
    check_device("seq_idx", seq_idx, x.device, "x")
    if can_be_read(seq_idx):
        _check_values(seq_idx)


def _check_values(seq_idx: torch.Tensor) -> None:
    for row in as_list(seq_idx):
        runs = [one for one, before in zip(row, [None, *row], strict=False) if one != before]
        counts = Counter(one for one in runs if one >= 0)
        again = [one for one, count in counts.items() if count > 1]
        if again:
            raise InvalidInputError(
                f"seq_idx must have the tokens of a sequence side by side, found {again[0]} in two "
                "places of a row: sort the tokens, or give the second part a name of its own"
            )


def ends_of(seq_idx: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of the rows of all batch entries, concatenated.

    How many sequences there are is not read from the device: there are as many as tokens, of which
    those at the end are empty.
    """
    # Not written in place: torch.func.linearize loses such writes to constants.
    begins = torch.ones_like(seq_idx[:, :1], dtype=torch.bool)
    first = torch.cat((begins, seq_idx[:, 1:] != seq_idx[:, :-1]), 1)
    total = seq_idx.numel()
    rows = torch.arange(total, device=seq_idx.device)
    ends = torch.full((total + 1,), total, device=seq_idx.device)
    # The first row of a sequence is the smallest of its rows.
    return ends.scatter_reduce(0, first.flatten().cumsum(0) - 1, rows, "amin")


def behind_state(
    x: torch.Tensor, seq_idx: torch.Tensor, state: torch.Tensor, past: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [batch, seqlen, dim] and seq_idx behind the last `past` columns of a state.

    The state precedes the first sequence of each batch entry, and is padding if padding comes
    first. The dtype of the result holds both.
    """
    columns = state[..., state.shape[2] - past :].transpose(1, 2)
    first = seq_idx[:, :1] if seq_idx.shape[1] else seq_idx.new_zeros(seq_idx.shape[0], 1)
    names = first.expand(-1, past)
    with without_promotion():
        return torch.cat((columns, x), 1), torch.cat((names, seq_idx), 1)


def pack(x: torch.Tensor, seq_idx: torch.Tensor) -> torch.Tensor:
    """The rows of all batch entries of x [batch, seqlen, dim], concatenated; zeros for padding."""
    # In the backward 0, the gradient of padding, times NaN would be NaN.
    return x.masked_fill((seq_idx < 0)[..., None], 0).reshape(1, seq_idx.numel(), x.shape[2])


def unpack(rows: torch.Tensor, seq_idx: torch.Tensor, past: int = 0) -> torch.Tensor:
    """Undo `pack`, with zeros for padding; without the `past` columns of a state."""
    x = rows.view(*seq_idx.shape, rows.shape[-1])
    return x[:, past:].masked_fill((seq_idx[:, past:] < 0)[..., None], 0)


def check_packed(x: Any, cu_seqlens: Any) -> None:
    """Refuse what is not packed rows and their offsets."""
    for name, one in (("x", x), ("cu_seqlens", cu_seqlens)):
        check_strided(name, one)
    if x.dim() != 2:
        raise ShapeError(f"x must be packed [total, dim], found {tuple(x.shape)}: squeeze it")
    check_cu_seqlens(cu_seqlens, "x", x, batch=1, rows=0)  # rows may belong to no sequence
    check_device("cu_seqlens", cu_seqlens, x.device, "x")
    if can_be_read(cu_seqlens):
        check_offsets(cu_seqlens, min(x.shape[0], int(cu_seqlens[-1])))


def last_tokens(x: torch.Tensor, cu_seqlens: torch.Tensor, count: int) -> torch.Tensor:
    """The last tokens of each packed sequence of x [total, dim], [sequences, dim, count].

    The newest is the last; zeros stand before the first of a sequence.
    """
    begins, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    rows = ends - count + torch.arange(count, device=x.device)
    inside = (rows >= begins)[..., None]
    with without_promotion():
        padded = torch.cat((x, x.new_zeros(1, x.shape[1])))  # so that there is a row to choose
    found = padded[rows.clamp(0, x.shape[0])]
    return torch.where(inside, found, 0).transpose(1, 2)
