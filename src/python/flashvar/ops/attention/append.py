"""New keys and values after those in a cache, and how many keys each sequence then has.

A batch may have padding sequences, as for CUDA graphs: their length, their slot, or a page that
they need is negative. They have no keys, and nothing is written for them.

Plain CUDA tensors take one Triton kernel. Elsewhere, and while torch.compile traces, torch's
functions do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashvar.ops.attention.cache import Cache
from flashvar.ops.sequences import as_int32

if TYPE_CHECKING:
    from flashvar.backends.triton.attention.append import AppendLaunch

__all__ = ["append", "formula", "launch_of", "write"]


def append(
    cache: Cache,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    before: torch.Tensor,
    begins: torch.Tensor | None,
) -> torch.Tensor:
    """Write k and v [batch, new, heads, head_dim] into a cache.

    Args:
        cache: The cache.
        k: At least one new key; None: only the lengths are wanted.
        v: New values.
        before: [batch], the position of the first new key of each sequence.
        begins: [batch], the position of its first key that is used; None: 0.

    Returns:
        int32 [batch], how many keys of each sequence are used.
    """
    launch = launch_of(cache, k, v, before, begins)
    if launch is None:
        return formula(cache, k, v, before, begins)
    if k is None or v is None:
        return launch(cache, None, None, before, begins)
    if not launch.are_apart(cache, k, v):
        written = _memory(cache.k), _memory(cache.v)
        k, v = (x.clone() if any(_meet(_memory(x), y) for y in written) else x for x in (k, v))
        launch = launch_of(cache, k, v, before, begins)  # copies may have other strides
        assert launch is not None
    return write(launch, cache, k, v, before, begins)


def launch_of(
    cache: Cache,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    before: torch.Tensor,
    begins: torch.Tensor | None,
) -> AppendLaunch | None:
    """The launch for arguments of `append`; None: torch's functions do the same."""
    if not cache.takes_triton(k, v, before, begins):
        return None
    from flashvar.backends.triton.attention.append import prepared

    return prepared(cache, k, v, before, begins)


def write(
    launch: AppendLaunch,
    cache: Cache,
    k: torch.Tensor,
    v: torch.Tensor,
    before: torch.Tensor,
    begins: torch.Tensor | None,
) -> torch.Tensor:
    """As `append`, where k and v share no memory with the cache."""
    lengths = launch(cache, k, v, before, begins)
    for x in (cache.k, cache.v):
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)
    return lengths


def _memory(x: torch.Tensor) -> tuple[int, int]:
    """The addresses where the storage of a tensor begins and ends."""
    storage = x.untyped_storage()
    begin = storage.data_ptr()
    return begin, begin + storage.nbytes()


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def formula(
    cache: Cache,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    before: torch.Tensor,
    begins: torch.Tensor | None,
) -> torch.Tensor:
    """As `append`, in torch's functions."""
    capacity = cache.capacity()
    starts = before.clamp(0, capacity)
    ends = starts if k is None else (starts + k.shape[1]).clamp(max=capacity)
    present = before >= 0
    if cache.slots is not None:
        present &= cache.slots >= 0
    if cache.table is not None:
        present &= ((cache.table >= 0) | ~cache.needed_pages(begins, ends)).all(1)
    if k is not None:
        assert v is not None
        cache.write(k, v, starts, present)
    return as_int32(torch.where(present, ends if begins is None else ends - begins, 0))
