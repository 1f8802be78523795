"""Rows: the indices of rows that are not padding, and the offsets of their sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Packed sequences, as arguments of `flashvar.attention_varlen`."""

    indices_q: torch.Tensor | None  # int64 [total_q], rows of the flattened batch; None: all
    indices_k: torch.Tensor | None
    offsets_q: torch.Tensor  # int32 [sequences + 1]
    offsets_k: torch.Tensor
    longest_q: int
    longest_k: int

    def to(self, device: torch.device) -> Rows:
        """The rows with their tensors on another device."""
        moved = {n: x.to(device) for n, x in self._asdict().items() if isinstance(x, torch.Tensor)}
        return self._replace(**moved)


def rows_of(numbers: torch.Tensor) -> Rows | None:
    """The rows of sequence numbers [batch, seqlen]: 0 is padding, each sequence has its own number.

    None if every entry of the batch is one sequence without padding. Waits for the device.
    """
    batch, seqlen = numbers.shape
    flat = numbers.flatten()
    indices = flat.nonzero().flatten()
    total = len(indices)
    number, entry = flat[indices], indices // seqlen
    begins = torch.ones(total, dtype=torch.bool, device=flat.device)
    begins[1:] = (number.diff() != 0) | (entry.diff() != 0)
    starts = begins.nonzero().flatten()
    if total == batch * seqlen and len(starts) == batch:
        return None
    offsets = torch.nn.functional.pad(starts, (0, 1), value=total).to(torch.int32)
    longest = int(offsets.diff().max()) if total else 0
    kept = None if total == batch * seqlen else indices
    return Rows(kept, kept, offsets, offsets, longest, longest)


def rows_of_keys(numbers: torch.Tensor) -> Rows | None:
    """All queries, and the keys whose number in `numbers` [batch, seqlen] is not 0.

    None if no number is 0. Waits for the device.
    """
    batch, seqlen = numbers.shape
    indices = numbers.flatten().nonzero().flatten()
    if len(indices) == batch * seqlen:
        return None
    lengths = (numbers != 0).sum(1)
    offsets_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    offsets_q = torch.arange(batch + 1, dtype=torch.int32, device=numbers.device) * seqlen
    return Rows(None, indices, offsets_q, offsets_k, seqlen, int(lengths.max()))


def has_holes(rows: Rows) -> bool:
    """Whether padding is inside a sequence, so that packing changes distances in it."""
    if rows.indices_q is None or len(rows.indices_q) == 0:
        return False
    jumps = rows.indices_q.diff() != 1
    jumps[rows.offsets_q[1:-1].long() - 1] = False
    return bool(jumps.any())


def rows_of_positions(positions: torch.Tensor) -> Rows | None:
    """The rows of positions [1, seqlen] that restart with every sequence; None for one sequence.

    Waits for the device.
    """
    return rows_of(_restarts(positions) + 1)


def rows_of_jumps(positions: torch.Tensor, batch: int) -> Rows | None:
    """The rows of sequences that begin wherever positions jump, as transformers takes them.

    Positions are [batch or 1, seqlen]. None for one sequence in each entry of the batch. Waits for
    the device.
    """
    begins = torch.nn.functional.pad(positions.diff() != 1, (1, 0))
    return rows_of((begins.cumsum(-1) + 1).expand(batch, -1))


def same_sequence(positions: torch.Tensor) -> torch.Tensor:
    """The pairs of positions [1, seqlen] in the same sequence, bool [1, 1, seqlen, seqlen]."""
    numbers = _restarts(positions)
    return (numbers[:, :, None] == numbers[:, None])[:, None]


def _restarts(positions: torch.Tensor) -> torch.Tensor:
    """The number of restarts up to each position."""
    return (positions == positions.min()).cumsum(-1)


def numbers_of(
    rows: Rows, batch: int, seqlen_q: int, seqlen_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence numbers [batch, seqlen] of queries and of keys, from 1; 0 for padding."""
    of_queries = _numbers(rows.offsets_q, rows.indices_q, batch * seqlen_q)
    of_keys = _numbers(rows.offsets_k, rows.indices_k, batch * seqlen_k)
    return of_queries.view(batch, seqlen_q), of_keys.view(batch, seqlen_k)


def _numbers(offsets: torch.Tensor, indices: torch.Tensor | None, count: int) -> torch.Tensor:
    positions = torch.arange(count if indices is None else len(indices), device=offsets.device)
    numbers = torch.searchsorted(offsets.long(), positions, right=True)
    numbers = numbers.masked_fill(positions >= offsets[-1], 0)
    return numbers if indices is None else numbers.new_zeros(count).index_copy(0, indices, numbers)
