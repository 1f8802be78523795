"""Conversion between padded batches and packed sequences, as in `flash_attn.bert_padding`."""

from __future__ import annotations

from typing import NoReturn, cast

import torch

from flashvar.compat.einops_patterns import rearrange, repeat
from flashvar.compat.not_provided import refuse_name
from flashvar.errors import DeviceError, DtypeError, InvalidInputError, ShapeError
from flashvar.ops.arguments import check_strided, count, refuses_unknown_subclasses
from flashvar.ops.autocast import without_promotion
from flashvar.ops.dispatch_modes import as_list

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "rearrange",
    "repeat",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Unpadded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]


@refuses_unknown_subclasses
def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] of `input` [rows, ...]."""
    _check_indices("input", input, indices)
    try:
        return input.index_select(0, indices)
    except (IndexError, RuntimeError) as error:
        if _is_beyond(indices, input.shape[0]):
            raise _beyond(indices, input.shape[0]) from error
        raise


def index_first_axis_residual(
    input: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `indices` of `input`, and `input` itself."""
    return index_first_axis(input, indices), input


@refuses_unknown_subclasses
def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Zeros [first_axis_dim, ...] with `values` [n, ...] in rows `indices`, which are unique."""
    _check_indices("values", values, indices)
    if values.shape[0] != indices.shape[0]:
        raise ShapeError(
            f"indices must name a row for each of values, found {indices.shape[0]} for "
            f"{tuple(values.shape)}: pass the indices that unpad_input returned with them"
        )
    rows = count("first_axis_dim", first_axis_dim)
    zeros = values.new_zeros((rows, *values.shape[1:]))
    try:
        with without_promotion():
            return zeros.index_copy(0, indices.long(), values)
    except (IndexError, RuntimeError) as error:
        if _is_beyond(indices, rows):
            raise _beyond(indices, rows) from error
        raise


@refuses_unknown_subclasses
def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> Unpadded:
    """Pack the rows of [batch, seqlen, ...] that a mask selects.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: [batch, seqlen], 1 for rows in use.
        unused_mask: [batch, seqlen], 1 for rows that are packed but not in use.

    Returns:
        The packed rows [total, ...]; their indices in the flattened batch [total]; the offsets of
        the sequences, int32 [batch + 1]; the longest length; the used lengths, int32 [batch].

    Raises:
        InvalidInputError: The masks do not fit the rows, or have other values than 0 and 1.
    """
    counts = _counts("attention_mask", attention_mask, hidden_states)
    packed = counts
    if unused_mask is not None:
        packed = counts | _counts("unused_mask", unused_mask, hidden_states)
    lengths = packed.sum(-1, dtype=torch.int32)
    used = counts.sum(-1, dtype=torch.int32)
    return (*_packed(hidden_states, packed, lengths), used)


@refuses_unknown_subclasses
def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pack rows of a batch whose entries hold several sequences each.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask_in_length: integers [batch, seqlen]: first the lengths of the sequences of an
            entry, then zeros.

    Returns:
        The packed rows, their indices, the offsets of all sequences, and the longest length.

    Raises:
        InvalidInputError: The lengths do not fit the rows, or are not integers.
    """
    _check_beside("attention_mask_in_length", attention_mask_in_length, hidden_states)
    if attention_mask_in_length.is_floating_point() or attention_mask_in_length.is_complex():
        raise DtypeError(
            f"attention_mask_in_length must be of integers, found "
            f"{attention_mask_in_length.dtype}: cast it with .to(torch.int32)"
        )
    totals = attention_mask_in_length.sum(-1)
    positions = torch.arange(attention_mask_in_length.shape[-1], device=totals.device)
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0]
    packed = _packed(hidden_states, positions < totals[:, None], lengths)
    if int(lengths.clamp(min=0).sum()) != packed[1].shape[0]:
        raise ShapeError(
            "the lengths in each batch entry of attention_mask_in_length must add up to at most "
            f"{positions.shape[0]}, found {as_list(lengths)[:8]} and so on: shorten the sequences"
        )
    return packed


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Write rows [total, ...] back to [batch, seqlen, ...] at `indices`; other rows are zeros.

    Raises:
        InvalidInputError: `indices` does not have one index for each row of `hidden_states`.
    """
    sizes = count("batch", batch), count("seqlen", seqlen)
    return index_put_first_axis(hidden_states, indices, sizes[0] * sizes[1]).unflatten(0, sizes)


def _packed(
    hidden_states: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    indices = mask.flatten().nonzero().flatten()
    offsets = lengths.cumsum(0, dtype=torch.int32)
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        torch.nn.functional.pad(offsets, (1, 0)),
        cast("int", lengths.max().item()) if lengths.shape[0] else 0,
    )


def _check_indices(name: str, rows: torch.Tensor, indices: torch.Tensor) -> None:
    check_strided(name, rows)
    check_strided("indices", indices)
    if rows.dim() == 0 or indices.dim() != 1:
        raise ShapeError(
            f"{name} must be [rows, ...] and indices [n], found {tuple(rows.shape)} and "
            f"{tuple(indices.shape)}: flatten the batch, and pass the results of unpad_input"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"indices must be int32 or int64, found {indices.dtype}: "
            "use mask.flatten().nonzero().flatten()"
        )
    _check_device("indices", indices, rows)


def _is_beyond(indices: torch.Tensor, rows: int) -> bool:
    return indices.numel() > 0 and not (0 <= int(indices.min()) <= int(indices.max()) < rows)


def _beyond(indices: torch.Tensor, rows: int) -> ShapeError:
    return ShapeError(
        f"indices must be below {rows}, found values from {int(indices.min())} to "
        f"{int(indices.max())}: pass the indices that unpad_input returned, and its sizes"
    )


def _check_device(name: str, tensor: torch.Tensor, rows: torch.Tensor) -> None:
    if tensor.device != rows.device:
        raise DeviceError(
            f"{name} must be on the device of the rows, {rows.device}, found {tensor.device}: "
            f"move it with .to({str(rows.device)!r})"
        )


def _check_beside(name: str, mask: torch.Tensor, hidden_states: torch.Tensor) -> None:
    check_strided("hidden_states", hidden_states)
    check_strided(name, mask)
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        raise ShapeError(
            f"{name} must be [batch, seqlen] of hidden_states [batch, seqlen, ...], found "
            f"{tuple(mask.shape)} with {tuple(hidden_states.shape)}: pass one entry for each row"
        )
    _check_device(name, mask, hidden_states)


def _counts(name: str, mask: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """The mask as bool."""
    _check_beside(name, mask, hidden_states)
    if mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any()):
        raise InvalidInputError(
            f"{name} must be 1 for rows in use and 0 elsewhere, found other values in a "
            f"{mask.dtype} mask: pass mask == 0 for a mask that is added to scores"
        )
    return mask != 0


def __getattr__(name: str) -> NoReturn:
    """Raise; for names of FlashAttention the error suggests what to use instead."""
    refuse_name(__name__, name)
