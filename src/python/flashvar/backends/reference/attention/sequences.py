"""Splits a call into parts, each of which is dense attention.

A dense call is one part. With packed sequences or seqused_k every sequence is a part. Rows of
packed tensors that belong to no sequence are in no part.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from flashvar.ops.attention.problem import Inputs, Problem


class Part(NamedTuple):
    """Ranges of batch entries, query rows and key rows, each as its begin and end.

    It holds numbers: torch.compile takes the sizes in slices that an object holds as constants.
    """

    entries: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def batch(self) -> slice:
        """The batch entries."""
        return slice(*self.entries)

    @property
    def queries(self) -> slice:
        """The query rows."""
        return slice(*self.rows)

    @property
    def keys(self) -> slice:
        """The key rows."""
        return slice(*self.columns)

    @property
    def seqlen_q(self) -> int:
        """The number of queries per sequence."""
        return self.rows[1] - self.rows[0]

    @property
    def seqlen_k(self) -> int:
        """The number of keys per sequence."""
        return self.columns[1] - self.columns[0]


def parts(problem: Problem, inputs: Inputs) -> Iterator[Part]:
    """The parts of a call; reads offsets and lengths on the host."""
    if problem.total_q is None and inputs.seqused_k is None:
        yield Part((0, problem.batch), (0, problem.seqlen_q), (0, problem.seqlen_k))
        return
    queries = _ranges(inputs.cu_seqlens_q, problem.batch, problem.total_q, problem.seqlen_q)
    keys = _ranges(inputs.cu_seqlens_k, problem.batch, problem.total_k, problem.seqlen_k)
    used = None if inputs.seqused_k is None else inputs.seqused_k.tolist()
    for index, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        if used is not None:
            length = min(max(used[index], 0), columns[1] - columns[0])
            columns = (columns[0], columns[0] + length)
        yield Part((index, index + 1), rows, columns)


def heads_first(tensor: torch.Tensor, layout: str, batch: slice, rows: slice) -> torch.Tensor:
    """View [batch, heads, rows, head_dim] of a part."""
    if tensor.dim() == 3:  # packed
        return tensor[rows].transpose(0, 1)[None]
    if layout == "bhsd":
        return tensor[batch, :, rows]
    return tensor[batch, rows].transpose(1, 2)


def of_queries(problem: Problem, tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """View of q, [batch, heads_kv, group, rows, head_dim]; a group of heads shares keys."""
    return _grouped(problem, heads_first(tensor, problem.layout, part.batch, part.queries))


def of_outputs(problem: Problem, tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The same view of the output or its gradient."""
    return _grouped(problem, heads_first(tensor, problem.layout_out, part.batch, part.queries))


def of_keys(problem: Problem, tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """View of k or v, [batch, heads_kv, rows, head_dim]."""
    return heads_first(tensor, problem.layout, part.batch, part.keys)


def of_lse(problem: Problem, lse: torch.Tensor, part: Part) -> torch.Tensor:
    """View of the log-sum-exp, [batch, heads_kv, group, rows]."""
    if problem.total_q is not None:
        view = lse[None, :, part.queries]
    else:
        view = lse[part.batch, :, part.queries]
    return view.unflatten(1, (problem.heads_kv, problem.heads_q // problem.heads_kv))


def _ranges(
    offsets: torch.Tensor | None, batch: int, total: int | None, length: int
) -> list[tuple[int, int]]:
    if offsets is None or total is None:
        return [(0, length)] * batch
    bounds = [min(max(offset, 0), total) for offset in offsets.tolist()]
    return [(start, max(start, stop)) for start, stop in pairwise(bounds)]


def _grouped(problem: Problem, heads: torch.Tensor) -> torch.Tensor:
    return heads.unflatten(1, (problem.heads_kv, problem.heads_q // problem.heads_kv))
