"""xformers' masks as arguments of flashvar's functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from flashvar.ops.attention.cache import Cache

__all__ = ["DENSE", "PACKED", "Keys", "begins_top_left"]


class Keys(NamedTuple):
    """The keys and values of packed sequences, as `flashvar.attention_varlen` takes them."""

    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_k: torch.Tensor | None  # None: k and v are [batch, seqlen, heads, head_dim]
    max_seqlen_k: int
    seqused_k: torch.Tensor | None


# Finds the keys of each sequence in k and v [total, heads, head_dim].
FindKeys: TypeAlias = Callable[[Any, torch.Tensor, torch.Tensor], Keys]


def _end_to_end(mask: Any, k: torch.Tensor, v: torch.Tensor) -> Keys:
    keys = mask.k_seqinfo
    return Keys(k, v, keys.seqstart.to(k.device), keys.max_seqlen, None)


def _from_the_top_left(mask: Any, k: torch.Tensor, v: torch.Tensor) -> Keys:
    """Only as many keys of a sequence as it has queries: no query sees the others."""
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    found = _end_to_end(mask, k, v)
    if queries is keys or list(queries.seqstart_py) == list(keys.seqstart_py):
        return found
    return found._replace(seqused_k=queries.seqstart.diff().to(k.device))


def _with_room_behind(mask: Any, k: torch.Tensor, v: torch.Tensor) -> Keys:
    keys = mask.k_seqinfo
    used = keys.seqlen.to(k.device)
    return Keys(k, v, keys.seqstart.to(k.device), keys.padding, used)


def _anywhere(mask: Any, k: torch.Tensor, v: torch.Tensor) -> Keys:
    keys = mask.k_seqinfo
    begins, lengths = keys.seqstart.to(k.device), keys.seqlen.to(k.device)
    cache = Cache(k[None], v[None], slots=torch.zeros_like(lengths))
    return _copied(cache, begins[: len(lengths)], lengths, keys.max_seqlen)


def _in_pages(mask: Any, k: torch.Tensor, v: torch.Tensor) -> Keys:
    keys = mask.k_seqinfo
    ends = keys.seqlen.to(k.device)
    begins = torch.zeros_like(ends)
    if not hasattr(keys, "padding"):  # the first keys of a sequence may be unused too
        begins = keys.seqstart.to(k.device)[: len(ends)]
    k, v = (one.unflatten(0, (-1, mask.page_size)) for one in (k, v))
    cache = Cache(k, v, table=mask.block_tables.to(k.device))
    return _copied(cache, begins, cache.used_lengths(begins, ends - begins), keys.max_seqlen)


def _copied(cache: Cache, begins: torch.Tensor, lengths: torch.Tensor, room: int) -> Keys:
    return Keys(*cache.read(begins, lengths, room), None, room, lengths.int())


Options: TypeAlias = Callable[[Any], dict[str, Any]]


def _everything(mask: Any) -> dict[str, Any]:
    return {}


def _causal(mask: Any) -> dict[str, Any]:
    return {"causal": True}


def _window(mask: Any) -> dict[str, Any]:
    return {"window_size": (mask.window_left, mask.window_right)}


def _causal_window(mask: Any) -> dict[str, Any]:
    """The size of a window of xformers includes the query's own key."""
    return {"window_size": (mask._window_size - 1, 0)}


# Class -> options of `flashvar.attention`.
DENSE: Final[dict[str, Options]] = {
    "LowerTriangularFromBottomRightMask": _causal,
    "LowerTriangularFromBottomRightLocalAttentionMask": _causal_window,
    "LocalAttentionFromBottomRightMask": _window,
}
# Class -> where keys are, and options of `flashvar.attention_varlen`, within each sequence.
PACKED: Final[dict[str, tuple[FindKeys, Options]]] = {
    "BlockDiagonalMask": (_end_to_end, _everything),
    "BlockDiagonalCausalMask": (_from_the_top_left, _causal),
    "BlockDiagonalCausalLocalAttentionMask": (_from_the_top_left, _causal_window),
    "BlockDiagonalCausalFromBottomRightMask": (_end_to_end, _causal),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (_end_to_end, _causal_window),
    "BlockDiagonalPaddedKeysMask": (_with_room_behind, _everything),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (_with_room_behind, _causal),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (_with_room_behind, _window),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (_with_room_behind, _causal_window),
    "BlockDiagonalGappyKeysMask": (_anywhere, _everything),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (_anywhere, _causal),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": (_anywhere, _window),
    "PagedBlockDiagonalPaddedKeysMask": (_in_pages, _everything),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (_in_pages, _causal),
    "PagedBlockDiagonalCausalLocalPaddedKeysMask": (_in_pages, _causal_window),
    "PagedBlockDiagonalGappyKeysMask": (_in_pages, _everything),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": (_in_pages, _causal),
}


def begins_top_left(mask: Any, kind: str) -> bool:
    """Whether diagonals begin in the top left corners of sequences with more queries than keys.

    With as many keys as queries, or more, they are diagonals of `flashvar.attention_varlen`, which
    end in the bottom right corners.
    """
    queries, keys = mask.q_seqinfo, mask.k_seqinfo
    if PACKED[kind][0] is not _from_the_top_left or queries is keys:
        return False
    offsets = (queries.seqstart_py, keys.seqstart_py)
    lengths = [[end - begin for begin, end in pairwise(one)] for one in offsets]
    return any(q > k for q, k in zip(*lengths, strict=True))
