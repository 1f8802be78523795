"""Attention of few queries through the split-KV kernels: decoding, and short blocks of queries.

The other forward has a program for each block of queries of one head: few programs where there are
few queries, each of which reads all keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from flashvar.backends.triton.attention import split_kv
from flashvar.backends.triton.attention.split_kv import Keys, Machine, most_keys
from flashvar.backends.triton.repeated import Bind, RepeatedLaunch

if TYPE_CHECKING:
    from flashvar.ops.attention.problem import Inputs, Launch, Problem

# Rows are queries times the heads of a group. The numbers are from 660 calls on an H200 by both
# kernels, at three head dims; with a bias from 528, beside the compiled kernel.
_LEAST_KEYS: Final = 512
_DECODED: Final = 8  # queries
_ROWS_OF_DECODED: Final = 32
_ROWS: Final = 128
# The other kernel has a program for each block of so many queries of a head. It is slower where
# they are fewer than the multiprocessors times keys / 8192: the more keys a program reads, the
# longer the other multiprocessors wait.
_BLOCK: Final = 64
_KEYS_OF_PROGRAM: Final = 8192
# With fewer keys it pays to read them once for a group of so many heads.
_LEAST_GROUP: Final = 4
_ROWS_OF_GROUP: Final = 16


def runs(problem: Problem) -> bool:
    """Whether the split-KV kernels run a problem."""
    return problem.total_k is None and problem.dropout_p == 0.0


def is_faster(problem: Problem, machine: Machine) -> bool:
    """Whether the split-KV kernels run a problem, and do so faster than the other forward."""
    # Results of splits have room for the longest sequence of queries, as often as there are any.
    if not runs(problem) or (problem.total_q is not None and problem.seqlen_q > _DECODED):
        return False
    group = problem.heads_q // problem.heads_kv
    rows = problem.seqlen_q * group
    keys = most_keys(problem, problem.seqlen_k)
    fills = 2 * problem.batch * problem.heads_kv >= machine.multiprocessors
    if keys < _LEAST_KEYS:
        plain = problem.bias is None
        return plain and fills and group >= _LEAST_GROUP and rows <= _ROWS_OF_GROUP
    if problem.bias is not None:  # another value for each score: many make it slower
        # The compiled kernel reads keys once for a group of one query, and for each head of more.
        read_again = problem.seqlen_q > 1 and group >= _LEAST_GROUP
        return rows <= _ROWS_OF_GROUP and (read_again or not fills)
    if problem.seqlen_q <= _DECODED and rows <= _ROWS_OF_DECODED:
        return True
    programs = problem.batch * problem.heads_q * -(-problem.seqlen_q // _BLOCK)
    return rows <= _ROWS and programs * _KEYS_OF_PROGRAM <= machine.multiprocessors * keys


def forward(
    problem: Problem, machine: Machine, splits: int | None = None, bind: Bind = RepeatedLaunch
) -> Launch:
    """The launch of a problem that `runs` takes; rows of q, k and v are contiguous."""
    keys = Keys(problem.k, problem.v, problem.batch, problem.seqlen_k)
    run = split_kv.prepare(problem, keys, machine, splits=splits, bind=bind)

    def launch(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        q, k, v, bias, sinks, slopes, _, offsets, _, used = inputs
        no_cache = (None,) * 4  # slots, a table, lengths before, first keys
        run(out, lse, q, k, v, *no_cache, used, slopes, bias=bias, sinks=sinks, offsets=offsets)

    return launch
