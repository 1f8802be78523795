"""Batches of documents that must not see each other, without a mask: by flashvar.attention_varlen.

documents = Documents.of_ids(batch["document_ids"])     # once a batch
out = documents.attention(q, k, v, causal=True)         # in every layer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flashvar.errors import DtypeError, InvalidInputError, ShapeError
from flashvar.ops.attention_varlen import attention_varlen

__all__ = ["Documents"]


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
        if not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2) or not ids.numel():
            found = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise ShapeError(
                f"ids must be a tensor (batch, seqlen) or (seqlen,) with tokens, got {found}: "
                "pass one id for each token"
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
        cls, lengths: Sequence[int], device: torch.device | str | None = None
    ) -> Documents:
        """Documents by their lengths in tokens, as they lie end to end.

        Raises:
            InvalidInputError: there are none, or one is negative.
        """
        if not lengths or min(lengths) < 0:
            raise InvalidInputError(
                f"lengths must be numbers of tokens, not negative, got {list(lengths)}: pass one "
                "for each document"
            )
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
        return cls(cu_seqlens, max(lengths), offsets[-1])

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
