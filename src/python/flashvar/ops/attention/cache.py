"""Keys and values of sequences in a cache: in pages, in slots of a pool, or anywhere.

The kernels read the keys of a sequence in consecutive rows, so they are copied into that order.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, NamedTuple

import torch

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.ops.arguments import check_strided, count
from flashvar.ops.attention.validate import rows_contiguous
from flashvar.ops.dispatch_modes import (
    are_plain,
    as_list,
    can_be_read,
    is_compiling,
    no_dispatch_mode_active,
)
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.sequences import as_int32, check_integers
from flashvar.ops.sharding import are_dtensors
from flashvar.ops.unknown_sizes import differ, is_known, smaller

__all__ = ["Cache", "read"]

_TRITON: Final = find_spec("triton") is not None


class Cache(NamedTuple):
    """Keys and values, and the slots that sequences have in them."""

    k: torch.Tensor  # [slots, capacity, heads, head_dim]
    v: torch.Tensor  # as k
    slots: torch.Tensor | None = None  # [batch], the slot of each sequence; None: its number
    table: torch.Tensor | None = None  # [batch, pages]: slots are pages of several for a sequence

    # Dynamo of torch 2.8 follows no property of a named tuple.
    def capacity(self) -> int:
        """How many keys a sequence can have."""
        pages = 1 if self.table is None else self.table.shape[1]
        found: int = self.k.shape[1] * pages
        return found

    def takes_triton(self, *others: torch.Tensor | None) -> bool:
        """Whether Triton kernels can run a call: they read memory, which must be of one device."""
        if is_compiling() or not (_TRITON and self.k.is_cuda and self.k.dtype in DTYPES):
            return False
        given = [x for x in (*self, *others) if x is not None]
        on_one_device = all(x.device == self.k.device for x in given)
        return on_one_device and no_dispatch_mode_active() and are_plain(*given)

    def needed_pages(self, begins: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
        """Which entries of the table [batch, pages] have keys from `begins` to `ends` [batch]."""
        assert self.table is not None
        size = self.k.shape[1]
        firsts = torch.arange(self.table.shape[1], device=ends.device) * size
        needed = firsts < ends[:, None]
        return needed if begins is None else needed & (firsts + size > begins[:, None])

    def used_lengths(self, begins: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The `lengths` [batch]; 0 for padding sequences, which need a page that is negative.

        An index below 0 would count from the last page. Where the host reads the table, all pages
        of a padding sequence are negative, and `read` refuses one alone.
        """
        if self.table is None:
            return lengths
        needed = self.needed_pages(begins, begins + lengths)
        absent = needed & (self.table < 0)
        padding = absent.any(1)
        if can_be_read(self.table, begins, lengths):
            padding &= (absent == needed).all(1)
        return torch.where(padding, 0, lengths)

    def write(
        self, k: torch.Tensor, v: torch.Tensor, begins: torch.Tensor, present: torch.Tensor
    ) -> None:
        """Write k and v [batch, new, heads, head_dim] at the positions from `begins` [batch] on.

        Only those of the sequences that are `present` [batch], as far as there is room. The host
        does not know which, so other rows repeat a row that is written: no place gets two values.
        Without any they rewrite what is in a row of the first slot.
        """
        positions = begins[:, None] + torch.arange(k.shape[1], device=k.device)
        written = present[:, None] & (positions < self.capacity())
        slots, rows = self._slots_and_rows(torch.where(written, positions, 0))
        written = (written & (slots >= 0)).flatten()
        slots = torch.where(written, slots.flatten(), 0)
        count = written.shape[0]
        # The number of a row that is written, or `count`.
        one = torch.nn.functional.pad(2 * written.int(), (0, 1), value=1).argmax()
        numbers = torch.arange(count, device=k.device)
        source = torch.where(written, numbers, one.clamp(max=count - 1))
        place = slots[source], rows.flatten()[source]
        of_k, of_v = (
            torch.where(one < count, new.flatten(0, 1)[source], cache[place])
            for new, cache in ((k, self.k), (v, self.v))
        )
        self.k[place] = of_k
        self.v[place] = of_v

    def read(
        self, begins: torch.Tensor, lengths: torch.Tensor, room: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys and values, [batch, room, heads, head_dim].

        They are the `lengths` [batch] from `begins` [batch] on, and then anything up to `room`.

        Raises:
            ShapeError: on the CPU, keys or pages that the cache does not have.
        """
        needs_gradient = torch.is_grad_enabled() and (self.k.requires_grad or self.v.requires_grad)
        if not needs_gradient and self.takes_triton(begins, lengths):
            from flashvar.backends.triton.attention.gather import launch

            return launch(self, begins, lengths, room)
        if can_be_read(begins, lengths):
            self._check_rows(begins, lengths)
        steps = torch.arange(room, device=self.k.device)
        used = steps < lengths[:, None]
        slots, rows = self._slots_and_rows(torch.where(used, begins[:, None] + steps, 0))
        # Tables may hold anything for pages without keys.
        slots = torch.where(used, slots, 0)
        if can_be_read(slots):
            name = "cache_batch_idx" if self.table is None else "block_table"
            check_slots(name, slots, self.k.shape[0])
        # Of a transposed cache torch makes transposed copies.
        return rows_contiguous(self.k[slots, rows]), rows_contiguous(self.v[slots, rows])

    def _check_rows(self, begins: torch.Tensor, lengths: torch.Tensor) -> None:
        wrong = (begins < 0) | (lengths < 0) | (begins + lengths > self.capacity())
        if bool(wrong.any()):
            sequence = int(wrong.nonzero()[0])
            raise ShapeError(
                f"the keys of a sequence must be from 0 to {self.capacity()} of the cache, found "
                f"{int(lengths[sequence])} keys from {int(begins[sequence])} on for sequence "
                f"{sequence}: correct the lengths, or the padding before them"
            )

    def _slots_and_rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and rows of the keys at positions [batch, n] of their sequences."""
        if self.table is not None:
            size = self.k.shape[1]
            return self.table.long().gather(1, positions.long() // size), positions % size
        slots = self.slots
        if slots is None:
            slots = torch.arange(len(positions), device=positions.device)
        return slots.long()[:, None].expand_as(positions), positions.long()


def refuse_dtensors(function: str, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse DTensors where rows of keys and values are copied: torch cannot index their rows."""
    if not is_compiling() and are_dtensors(function, tensors):
        raise InvalidInputError(
            f"{name} must come with plain tensors, found DTensors, whose rows torch cannot copy: "
            "pass to_local() of tensors that are sharded over the heads"
        )


def check_slots(name: str, slots: torch.Tensor, slots_of_cache: int) -> None:
    """Refuse indices of slots or pages that a cache does not have."""
    wrong = (slots < 0) | (slots >= slots_of_cache)
    if bool(wrong.any()):
        raise ShapeError(
            f"{name} must be from 0 to {slots_of_cache - 1}, found "
            f"{as_list(slots[wrong].unique())}: pass indices into the first dimension of the cache"
        )


def read(
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    longest: int,
    *,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of the keys and values of packed sequences, and how many each sequence has.

    Args:
        k: [total, heads, head_dim]; with block_table [pages, page_size, heads, head_dim].
        v: As k.
        cu_seqlens_k: The offsets of the sequences; with block_table only their lengths count.
        longest: An upper bound of the lengths.
        block_table: [batch, pages], the pages of each sequence; negative for padding.
        leftpad_k: [batch], how many keys at the begin of each sequence are not used.
        seqused_k: [batch], the lengths that are used, with those at the begin.
    """
    check_packed(k, v, cu_seqlens_k, block_table)
    ends = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    begins = torch.zeros_like(ends) if leftpad_k is None else leftpad_k
    lengths = ends - begins
    room = count("max_seqlen_k", longest)
    if block_table is None:
        rows = cu_seqlens_k.diff()
        if can_be_read(ends, rows) and bool((ends > rows).any()):
            raise ShapeError(
                f"seqused_k must be at most the keys of each sequence, {as_list(rows)}, found "
                f"{as_list(ends)}: pass how many keys to use, from the first on"
            )
        cache = Cache(k[None], v[None], slots=torch.zeros_like(ends))
        begins = begins + cu_seqlens_k[:-1]
    else:
        cache = Cache(k, v, table=block_table)
        if can_be_read(ends) and len(ends) and int(ends.max()) > cache.capacity():
            raise ShapeError(
                f"block_table must have pages for {int(ends.max())} keys of a sequence, found room "
                f"for {cache.capacity()}: add columns"
            )
    if can_be_read(lengths) and bool((lengths > room).any()):
        raise ShapeError(
            f"max_seqlen_k must be at least the longest sequence, found {room} and a sequence of "
            f"{int(lengths.max())}: pass int(lengths.max())"
        )
    lengths = cache.used_lengths(begins, lengths)
    room = smaller(room, cache.capacity())
    return *cache.read(begins, lengths, room), as_int32(lengths)


def check_packed(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens_k: torch.Tensor, table: torch.Tensor | None
) -> None:
    """Refuse keys and values of packed sequences, or their pages, that do not fit together."""
    check_strided("k", k)
    check_strided("v", v)
    check_strided("cu_seqlens_k", cu_seqlens_k)
    if differ(k.shape[:-1], v.shape[:-1]):
        raise ShapeError(
            f"k and v must have the same shape except for the head dim, found {tuple(k.shape)} and "
            f"{tuple(v.shape)}: pass one value for each key"
        )
    if table is None:
        return
    refuse_dtensors("flash_attn_varlen_func", "block_table", {"k": k, "v": v})
    check_strided("block_table", table)
    check_integers("block_table", table)
    batch = cu_seqlens_k.shape[0] - 1
    if k.dim() != 4 or table.dim() != 2 or is_known(table.shape[0] != batch):
        raise ShapeError(
            f"block_table must be [batch, pages] of {batch} sequences with k [pages, page_size, "
            f"heads, head_dim], found {tuple(table.shape)} with {tuple(k.shape)}: reshape them"
        )
