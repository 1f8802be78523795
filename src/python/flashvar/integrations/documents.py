"""Batches of documents that must not see each other, without a mask: by flashvar.attention_varlen.

documents = Documents.of_ids(batch["document_ids"])     # once a batch
out = documents.attention(q, k, v, causal=True)         # in every layer
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from flashvar.errors import DeviceError, DtypeError, InvalidInputError, ShapeError
from flashvar.ops.attention.validate import check_strided
from flashvar.ops.attention.varlen import attention_varlen

__all__ = ["Documents"]

# What an int32 holds.
_MOST_TOKENS: Final = 2**31 - 1


class Documents(NamedTuple):
    """Where documents begin and end in rows of tokens, laid end to end."""

    cu_seqlens: torch.Tensor  # int32 [documents + 1], on the device of the ids
    max_seqlen: int  # tokens of the longest
    tokens: int  # of all

    @classmethod
    def of_ids(cls, ids: torch.Tensor) -> Documents:
        """Documents by the id of each token; a change of the id begins another.

        Waits for the device: the number of documents and the longest are read from it.

        Args:
            ids: Integers [batch, seqlen], or [seqlen]. A row begins a document of its own. Padding
                may have any id that its neighbors have not: it attends to itself alone.

        Raises:
            ShapeError, DtypeError: other tensors.
        """
        check_strided("ids", ids)
        if ids.dim() not in (1, 2) or not ids.numel():
            raise ShapeError(
                "ids must be a tensor (batch, seqlen) or (seqlen,) with tokens, got "
                f"{tuple(ids.shape)}: pass one id for each token"
            )
        if ids.is_meta:
            raise DeviceError(
                "ids must have values, got a tensor on meta: make Documents where the batch is made"
            )
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise DtypeError(f"ids must be integers, got {ids.dtype}: pass one id for each token")
        rows = ids.reshape(-1, ids.shape[-1])
        begins = torch.ones_like(rows, dtype=torch.bool)
        torch.ne(rows[:, 1:], rows[:, :-1], out=begins[:, 1:])
        starts = begins.flatten().nonzero().flatten()
        ends = torch.cat([starts[1:], starts.new_tensor([ids.numel()])])
        cu_seqlens = torch.cat([starts, ends[-1:]]).to(torch.int32)
        return cls(cu_seqlens, int((ends - starts).max()), ids.numel())

    @classmethod
    def of_lengths(
        cls,
        lengths: Sequence[int] | torch.Tensor,
        device: torch.device | str | None = None,
    ) -> Documents:
        """Documents by their lengths in tokens, as they lie end to end.

        Raises:
            InvalidInputError: there are none, or one is negative.
            DeviceError: torch knows no such device.
        """
        numbers = _whole_numbers(lengths)
        offsets = [0, *accumulate(numbers)]
        if not numbers or min(numbers) < 0 or offsets[-1] > _MOST_TOKENS:
            raise InvalidInputError(
                f"lengths must be numbers of tokens, not negative, and less than 2^31 together, "
                f"got {lengths!r}: pass one for each document"
            )
        try:
            where = None if device is None else torch.device(device)
        except (TypeError, RuntimeError) as error:
            raise DeviceError(
                f"device must be one of torch, got {device!r}: pass that of the tokens"
            ) from error
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=where)
        return cls(cu_seqlens, max(numbers), offsets[-1])

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Attention within each document.

        Args:
            q: [batch, seqlen, heads_q, head_dim] or [tokens, heads_q, head_dim].
            k: Likewise, with heads_kv.
            v: Likewise, with its own head dim.
            options: causal, scale, window_size, softcap, alibi_slopes, dropout_p, deterministic
                and backend of `flashvar.attention_varlen`.

        Returns:
            The output, in the shape of q but with the head dim of v.

        Raises:
            ShapeError: not one row for each token of the documents.
            InvalidInputError, BackendUnavailableError: as `flashvar.attention_varlen`.
        """
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_strided(name, tensor)
            if tensor.dim() not in (3, 4):
                raise ShapeError(
                    f"{name} must have shape (batch, seqlen, heads, head_dim) or (tokens, heads, "
                    f"head_dim), got {tuple(tensor.shape)}: add or join dimensions"
                )
        packed = [x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v)]
        if packed[0].shape[0] != self.tokens:
            raise ShapeError(
                f"q must hold the {self.tokens} tokens of the documents, got {tuple(q.shape)}: "
                "make Documents of this batch's ids"
            )
        out = attention_varlen(
            *packed,
            cu_seqlens_q=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen,
            **options,
        )
        return out.view(*q.shape[:-1], v.shape[-1])


def _whole_numbers(lengths: Any) -> list[int]:
    """The lengths as Python's integers; none where they are no such numbers."""
    try:
        given = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
        return [operator.index(length) for length in given]
    except (TypeError, ValueError, RuntimeError):
        return []
