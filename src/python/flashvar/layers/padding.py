"""Padded batches packed into one row of the tokens that count, and unpacked again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashvar.errors import ShapeError


class Packing(NamedTuple):
    """Where the tokens of a packed row stand in the batch."""

    indices: torch.Tensor  # [total], rows of the flattened batch
    cu_seqlens: torch.Tensor  # [batch + 1]
    batch: int
    seqlen: int


def packing_of(mask: torch.Tensor, batch: int, seqlen: int) -> Packing:
    """The packing of the last `seqlen` tokens that a mask of all tokens keeps.

    Raises:
        ShapeError: the mask is not [batch, seqlen or more].
    """
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < seqlen:
        raise ShapeError(
            f"attention_mask must be [batch, seqlen], 1 for tokens and 0 for padding, that is "
            f"({batch}, {seqlen} or more), found {tuple(mask.shape)}: masks of pairs of tokens "
            "have no meaning in linear attention"
        )
    kept = mask[:, mask.shape[1] - seqlen :].bool()
    lengths = kept.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return Packing(kept.flatten().nonzero().flatten(), cu_seqlens, batch, seqlen)


def pack(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[batch, seqlen, ...] as [1, total, ...]."""
    return x.flatten(0, 1)[packing.indices].unsqueeze(0)


def unpack(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """[1, total, ...] as [batch, seqlen, ...], padding as zeros."""
    rows = x.new_zeros(packing.batch * packing.seqlen, *x.shape[2:])
    rows = rows.index_copy(0, packing.indices, x.squeeze(0))
    return rows.unflatten(0, (packing.batch, packing.seqlen))


def get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows of the tokens that a mask [batch, seqlen] keeps, their cu_seqlens and longest length."""
    packing = packing_of(attention_mask, *attention_mask.shape)
    return packing.indices, packing.cu_seqlens, int(packing.cu_seqlens.diff().max())
