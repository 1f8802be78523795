"""Attention within the documents of a batch, through flashvar.attention_varlen, without a mask.

The boundaries are found once per batch, and used in every layer:

    documents = Documents.of_ids(batch["document_ids"])
    out = documents.attention(q, k, v, causal=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from flashvar.errors import DeviceError, DtypeError, InvalidInputError, ShapeError
from flashvar.ops.arguments import as_device, check_strided, whole_number
from flashvar.ops.attention.varlen import attention_varlen
from flashvar.ops.dispatch_modes import as_list

__all__ = ["Documents"]

# The largest int32.
_MAX_TOKENS: Final = 2**31 - 1


class Documents(NamedTuple):
    """The offsets of packed documents.

    `cu_seqlens` is int32 [documents + 1], on the device of the ids. `max_seqlen` is the number of
    tokens of the longest document, `tokens` that of all documents.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    tokens: int

    @classmethod
    def of_ids(cls, ids: torch.Tensor) -> Documents:
        """Documents from the id of each token; a new document begins where the id changes.

        Waits for the device, to read the number of documents and the longest length.

        Args:
            ids: Integers [batch, seqlen], or [seqlen]. Every row begins a new document. Padding may
                have any id that differs from its neighbors'; it attends only to itself.

        Raises:
            ShapeError, DtypeError: ids have another shape or dtype.
        """
        check_strided("ids", ids)
        if ids.dim() not in (1, 2) or not ids.numel():
            raise ShapeError(
                "ids must be a tensor (batch, seqlen) or (seqlen,) with tokens, found "
                f"{tuple(ids.shape)}: pass one id for each token"
            )
        if ids.is_meta:
            raise DeviceError(
                "ids must have values, found a meta tensor: make Documents from the real batch"
            )
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise DtypeError(f"ids must be integers, found {ids.dtype}: pass one id for each token")
        rows = ids.reshape(-1, ids.shape[-1])
        first = torch.ones_like(rows[:, :1], dtype=torch.bool)
        begins = torch.cat([first, rows[:, 1:] != rows[:, :-1]], 1)
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
        """Documents from their lengths, in the order in which they are packed.

        Args:
            lengths: The number of tokens of each document.
            device: Where the tensors of `attention` are; torch's default device by default.

        Raises:
            InvalidInputError: there are no lengths, or a length is negative.
            DeviceError: torch has no such device.
        """
        numbers = _whole_numbers(lengths)
        offsets = [0, *accumulate(numbers)]
        if not numbers or min(numbers) < 0 or offsets[-1] > _MAX_TOKENS:
            raise InvalidInputError(
                f"lengths must be numbers of tokens, not negative, with a sum below 2^31, found "
                f"{lengths!r}: pass one for each document"
            )
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=as_device(device))
        return cls(cu_seqlens, max(numbers), offsets[-1])

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Attention within each document.

        Args:
            q: [batch, seqlen, heads_q, head_dim] or [tokens, heads_q, head_dim].
            k: Likewise, with heads_kv.
            v: Likewise, with its own head dim.
            options: causal, scale, window_size, softcap, sinks, alibi_slopes, dropout_p,
                deterministic and backend of `flashvar.attention_varlen`.

        Returns:
            The output, in the shape of q but with the head dim of v.

        Raises:
            ShapeError: the tensors do not have one row for each token of the documents.
            InvalidInputError, BackendUnavailableError: as `flashvar.attention_varlen`.
        """
        if options.get("return_lse"):
            raise InvalidInputError(
                "return_lse must be left out, found "
                f"{options['return_lse']!r}: for the log-sum-exp pass cu_seqlens and max_seqlen of "
                "the documents to flashvar.attention_varlen"
            )
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_strided(name, tensor)
            if tensor.dim() not in (3, 4):
                raise ShapeError(
                    f"{name} must have shape (batch, seqlen, heads, head_dim) or (tokens, heads, "
                    f"head_dim), found {tuple(tensor.shape)}: add or join dimensions"
                )
            if tensor.shape[:-2].numel() != self.tokens:
                raise ShapeError(
                    f"{name} must hold the {self.tokens} tokens of the documents, found "
                    f"{tuple(tensor.shape)}: make Documents of this batch's ids"
                )
        packed = [x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v)]
        out = attention_varlen(
            *packed,
            cu_seqlens_q=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen,
            **options,
        )
        return out.view(*q.shape[:-1], v.shape[-1])


def _whole_numbers(lengths: Any) -> list[int]:
    """The lengths as Python integers; empty if they are not whole numbers."""
    try:
        given = as_list(lengths) if isinstance(lengths, torch.Tensor) else lengths
        numbers = [whole_number(length) for length in given]
    except (TypeError, ValueError, RuntimeError):
        return []
    return [] if None in numbers else numbers
