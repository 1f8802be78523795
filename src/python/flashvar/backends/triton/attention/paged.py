"""The launches of attention on a KV cache that is read in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashvar.backends.triton.attention import split_kv
from flashvar.backends.triton.attention.split_kv import Keys, SplitKVLaunch
from flashvar.ops.attention.problem import Strides
from flashvar.ops.plans import Maker, maker_of

if TYPE_CHECKING:
    from flashvar.ops.attention.cache import Cache
    from flashvar.ops.attention.problem import Problem


class PagedLaunch(NamedTuple):
    """The kernels of a call, and how its results are made."""

    run: SplitKVLaunch
    make_out: Maker
    make_lse: Maker

    def __call__(self, *given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and its log-sum-exp.

        `given`: q, k, v, slots, table, before, begins, lengths, slopes and the offsets of packed
        queries, as of the kernel.
        """
        out, lse = self.make_out(), self.make_lse()
        self.run(out, lse, *given[:-1], offsets=given[-1])
        return out, lse


def prepare(
    problem: Problem, q: torch.Tensor, cache: Cache, new: int, splits: int | None = None
) -> PagedLaunch:
    """The launch of a problem whose keys are those of a cache; rows of all tensors are contiguous.

    Args:
        problem: Its strides of k and v are not used.
        q: [batch, seqlen_q, heads_q, head_dim] or [total_q, heads_q, head_dim].
        cache: The cache.
        new: How many keys of each sequence the call has added.
        splits: How many programs share the keys of a sequence; None: as the device needs.
    """
    machine = split_kv.machine_of(problem.device)
    return PagedLaunch(
        split_kv.prepare(problem, _keys(cache), machine, new, splits),
        maker_of(torch.empty(problem.out_shape, dtype=q.dtype, device="meta"), q.device),
        maker_of(torch.empty(problem.lse_shape, dtype=problem.lse_dtype, device="meta"), q.device),
    )


def _keys(cache: Cache) -> Keys:
    slots, size = cache.k.shape[:2]
    k, v = (Strides(*x.stride()[:3]) for x in (cache.k, cache.v))
    if cache.table is None:
        return Keys(k, v, slots, size)
    row, page = cache.table.stride()
    return Keys(k, v, slots, size, cache.table.shape[1], (row, page))
