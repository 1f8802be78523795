"""Between padded batches and packed sequences, as `flash_attn.bert_padding` does it."""

from __future__ import annotations

from typing import cast

import torch

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Unpadded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] of `input` [rows, ...]."""
    return input.index_select(0, indices)


def index_first_axis_residual(
    input: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `indices` of `input`, and `input` itself."""
    return input.index_select(0, indices), input


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Zeros [first_axis_dim, ...] with `values` [n, ...] in rows `indices`, each at most once."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices, values)


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> Unpadded:
    """Pack the rows of [batch, seqlen, ...] that a mask names.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: [batch, seqlen], 1 where a row counts.
        unused_mask: [batch, seqlen], 1 where a row is packed too, but not used.

    Returns:
        The packed rows [total, ...]; their places in the flattened batch [total]; the offsets of
        the sequences, int32 [batch + 1]; the longest length; the used lengths, int32 [batch].
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = packed.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    return (*_packed(hidden_states, packed, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pack rows of a batch whose entries hold several sequences each.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask_in_length: integers [batch, seqlen]: the lengths of the sequences of an
            entry one after another, and 0 for the rest.

    Returns:
        The packed rows, their places, the offsets of all sequences, and the longest length.
    """
    totals = attention_mask_in_length.sum(-1)
    places = torch.arange(attention_mask_in_length.shape[-1], device=totals.device)
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0]
    return _packed(hidden_states, places < totals[:, None], lengths)


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Rows [total, ...] back in their places of [batch, seqlen, ...], zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def _packed(
    hidden_states: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    indices = mask.flatten().nonzero().flatten()
    offsets = lengths.cumsum(0, dtype=torch.int32)
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        torch.nn.functional.pad(offsets, (1, 0)),
        cast("int", lengths.max().item()),
    )
