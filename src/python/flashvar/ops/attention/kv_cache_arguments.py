"""The arguments of `flash_attn_with_kvcache`, and which of them are refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashvar.errors import (
    DtypeError,
    InvalidInputError,
    LayoutError,
    ShapeError,
)
from flashvar.ops.arguments import check_strided
from flashvar.ops.attention.cache import Cache, check_slots, refuse_dtensors
from flashvar.ops.attention.validate import check_last_stride
from flashvar.ops.dispatch_modes import (
    are_plain,
    as_list,
    can_be_read,
    in_transform,
    is_compiling,
    is_faking,
    is_mapped,
)
from flashvar.ops.sequences import check_integers, check_own_memory, overlap
from flashvar.ops.sharding import are_dtensors
from flashvar.ops.unknown_sizes import differ, is_known


class Arguments(NamedTuple):
    """The arguments of `flash_attn_with_kvcache`, in their order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    cache_seqlens: int | torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    block_table: torch.Tensor | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    rotary_interleaved: bool
    alibi_slopes: torch.Tensor | None


def are_of_sequences(lengths: Any) -> bool:
    """Whether lengths are one for each sequence, rather than one number for all."""
    return isinstance(lengths, torch.Tensor) and lengths.dim() > 0


def refuse_mapped(given: Arguments) -> None:
    """Refuse tensors that torch.vmap maps."""
    if not in_transform():
        return
    for name, x in given._asdict().items():
        if isinstance(x, torch.Tensor) and is_mapped(x):
            raise InvalidInputError(
                "flash_attn_with_kvcache must have its sequences in the batch, found torch.vmap "
                f"over {name}: pass them as one batch with their caches"
            )


def check(given: Arguments) -> None:
    """Refuse arguments that do not fit together, before anything is written."""
    tensors = {"q": given.q, "k_cache": given.k_cache, "v_cache": given.v_cache}
    new = {"k": given.k, "v": given.v}
    if (given.k is None) is not (given.v is None):
        raise InvalidInputError("k and v must come together, found one alone: pass both, or none")
    if given.k is not None:
        tensors |= {name: one for name, one in new.items() if one is not None}
        if given.cache_seqlens is None:
            raise InvalidInputError(
                "k must come with cache_seqlens, found none: pass how many keys the cache holds"
            )
        if not is_compiling() and are_dtensors("flash_attn_with_kvcache", tensors):
            raise InvalidInputError(
                "k must come with plain tensors, found DTensors, into which torch writes no rows: "
                "pass to_local() of tensors that are sharded over the batch or the heads"
            )
    for name in ("cache_batch_idx", "cache_leftpad", "block_table"):
        if getattr(given, name) is not None:
            refuse_dtensors("flash_attn_with_kvcache", name, tensors)
    for name, one in tensors.items():
        check_strided(name, one)
        if one.dim() != 4 or one.dtype != given.q.dtype:
            wrong = ShapeError if one.dim() != 4 else DtypeError
            raise wrong(
                f"{name} must be [batch, seqlen, heads, head_dim] in the dtype of q, "
                f"{given.q.dtype}, found {tuple(one.shape)} in {one.dtype}: reshape or cast it"
            )
    if (given.rotary_cos is None) is not (given.rotary_sin is None):
        raise InvalidInputError(
            "rotary_cos and rotary_sin must come together, found one alone: pass both, or none"
        )
    if given.rotary_cos is not None and given.k is None:
        raise InvalidInputError(
            "rotary_cos must come with k and v, found none: rotate q with apply_rotary_emb"
        )
    if given.block_table is not None and given.cache_batch_idx is not None:
        raise InvalidInputError(
            "block_table must come without cache_batch_idx, found both: reorder the rows of the "
            "table"
        )
    _check_sizes(given)


def _check_sizes(given: Arguments) -> None:
    batch = given.q.shape[0]
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"):
        one = getattr(given, name)
        if one is None or (name == "cache_seqlens" and not are_of_sequences(one)):
            continue
        check_strided(name, one)
        check_integers(name, one)
        rank = 2 if name == "block_table" else 1
        if one.dim() != rank or is_known(one.shape[0] != batch):
            raise ShapeError(
                f"{name} must have {rank} dimensions, the first of {batch} sequences, found "
                f"{tuple(one.shape)}: pass an entry for each sequence of q"
            )
    if differ(given.k_cache.shape[:3], given.v_cache.shape[:3]):
        raise ShapeError(
            f"k_cache and v_cache must have the same shape except for the head dim, found "
            f"{tuple(given.k_cache.shape)} and {tuple(given.v_cache.shape)}: give them one shape"
        )
    in_order = given.block_table is None and given.cache_batch_idx is None
    if in_order and is_known(given.k_cache.shape[0] < batch):
        raise ShapeError(
            f"k_cache must have a slot for each of {batch} sequences, found "
            f"{given.k_cache.shape[0]}: make it larger, or pass cache_batch_idx"
        )
    if in_order and given.cache_leftpad is None:  # otherwise keys and values are copied
        check_last_stride("k_cache", given.k_cache)
        check_last_stride("v_cache", given.v_cache)
    if given.k is None or given.v is None:
        return
    if is_known(given.k.shape[1] != given.v.shape[1]):
        raise ShapeError(
            f"k and v must have the same number of rows, found {tuple(given.k.shape)} and "
            f"{tuple(given.v.shape)}: pass one value for each key"
        )
    for name, one, cache in (("k", given.k, given.k_cache), ("v", given.v, given.v_cache)):
        if is_known(one.shape[0] != batch) or differ(one.shape[2:], cache.shape[2:]):
            raise ShapeError(
                f"{name} must have {batch} sequences of the heads and head dim of {name}_cache, "
                f"{tuple(cache.shape)}, found {tuple(one.shape)}: reshape it"
            )
        if not is_compiling():
            check_own_memory(f"{name}_cache", cache)


def check_apart(given: Arguments) -> None:
    """Refuse caches whose first slots have new values written over the new keys.

    While torch.compile traces only one tensor given twice: there are no addresses.
    """
    k_cache, v_cache = given.k_cache, given.v_cache
    # Of a pool keys and values may use different slots or pages, and its views may overlap.
    in_order = given.block_table is None and given.cache_batch_idx is None
    slots = given.q.shape[0] if in_order else 1
    if k_cache is v_cache:
        found = "one tensor for both"
    elif not (is_compiling() or in_transform()) and overlap(k_cache[:slots], v_cache[:slots]):
        found = "elements of both at the same addresses"
    else:
        return
    raise LayoutError(
        f"k_cache and v_cache must not share memory if new keys are written, found {found}: give "
        "each its own memory, such as kv[0] and kv[1] of one tensor"
    )


def check_lengths(
    cache: Cache, before: torch.Tensor, begins: torch.Tensor | None, new: int
) -> int | None:
    """Refuse more keys than the cache can hold, and slots or pages that it does not have.

    On a GPU only the lengths of pages are read, for which the host waits, as in FlashAttention: a
    table read beyond its end would give keys of other sequences.

    Returns:
        The length of the longest sequence; None where lengths are not read.
    """
    on_host = can_be_read(before)
    if on_host:
        cache, before, begins = _without_padding(cache, before, begins, new)
    elif cache.table is None or not _waits_for(before):
        return None
    used, capacity = before + new, cache.capacity()
    longest = max(int(used.max()), 0) if used.numel() else 0
    if longest > capacity:
        what = "k_cache holds" if cache.table is None else "block_table addresses"
        raise ShapeError(
            f"{what} at most {capacity} keys of a sequence, found {longest} with the new ones: "
            "make it larger"
        )
    if not on_host:
        return longest
    if begins is not None and bool((used < begins).any()):
        raise ShapeError(
            "cache_seqlens, with the new keys, must not be below cache_leftpad, "
            f"{as_list(begins)}, found {as_list(before)}: pass how many rows of the cache are in "
            "use, padding included"
        )
    if cache.table is not None:
        check_slots("block_table", cache.table[cache.needed_pages(begins, used)], cache.k.shape[0])
        if new and used.numel():
            _check_written_pages(cache, begins, before, new)
    elif cache.slots is not None:
        check_slots("cache_batch_idx", cache.slots, cache.k.shape[0])
        if new and len(cache.slots.unique()) < len(cache.slots):
            raise InvalidInputError(
                f"cache_batch_idx must name each slot once if new keys are written, found "
                f"{as_list(cache.slots)}: give every sequence a slot of its own"
            )
    return longest


def _without_padding(
    cache: Cache, before: torch.Tensor, begins: torch.Tensor | None, new: int
) -> tuple[Cache, torch.Tensor, torch.Tensor | None]:
    """A cache, lengths, and the first rows in use, without the padding sequences of the batch.

    Sequences that lack the pages of some keys, but not of all, are kept: they are an error.
    """
    real = before >= 0  # [batch]: not padding
    slots, table = cache.slots, cache.table
    if slots is not None:
        real &= slots >= 0
    if table is not None:
        needed = cache.needed_pages(begins, before + new)
        real &= ~needed.any(1) | (needed & (table >= 0)).any(1)
    slots, table, begins = (None if x is None else x[real] for x in (slots, table, begins))
    return cache._replace(slots=slots, table=table), before[real], begins


def _check_written_pages(
    cache: Cache, begins: torch.Tensor | None, before: torch.Tensor, new: int
) -> None:
    """Refuse new keys in a row of a page that the table uses twice."""
    assert cache.table is not None
    size = cache.k.shape[1]
    rows = torch.arange(int(before.max()) + new, device=before.device)
    used = rows < before[:, None] + new
    if begins is not None:
        used &= rows >= begins[:, None]
    places = cache.table.long()[:, rows // size] * size + rows % size
    of_used, times = places[used].unique(return_counts=True)
    written = places[used & (rows >= before[:, None])]
    shared = written[torch.isin(written, of_used[times > 1])]
    if len(shared):
        raise InvalidInputError(
            "block_table must have each row of new keys once, found rows of the pages "
            f"{as_list((shared // size).unique())} twice: copy a shared page before keys are added "
            "to it"
        )


def _waits_for(lengths: torch.Tensor) -> bool:
    """Whether lengths on a GPU are read: not while a graph is traced or captured."""
    if is_compiling() or is_faking() or not (lengths.is_cuda and are_plain(lengths)):
        return False
    return not torch.cuda.is_current_stream_capturing()
