"""What the log tells at debug level of each kind of call: which kernels it takes, and why.

Asked once per plan. Where the log does not want it, launches are as they were: a call costs nothing
more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import compress
from typing import TYPE_CHECKING, Final

from flashvar import families
from flashvar.families import Rows
from flashvar.variant import pair_words

if TYPE_CHECKING:
    import torch

    from flashvar.backends import BackwardLaunch, Launch
    from flashvar.ops.attention_problem import (
        BackwardProblem,
        Gradients,
        Inputs,
        Problem,
        Strides,
    )
    from flashvar.verdicts import Verdict

_log: Final = logging.getLogger("flashvar")


def follow_forward(launch: Launch, problem: Problem, verdict: Verdict) -> Launch:
    """The launch itself, or one that says in the log how each call of it is served."""
    if not _log.isEnabledFor(logging.DEBUG):
        return launch
    said: set[str] = set()

    def followed(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        rows = [*_of_inputs(inputs, problem), _rows("out", out, problem.out)]
        _say("attention_fwd", problem, verdict, rows, said)
        launch(inputs, out, lse)

    return followed


def follow_backward(
    launch: BackwardLaunch, problem: BackwardProblem, verdict: Verdict
) -> BackwardLaunch:
    """As `follow_forward`."""
    if not _log.isEnabledFor(logging.DEBUG):
        return launch
    said: set[str] = set()
    forward = problem.forward

    def followed(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
    ) -> None:
        rows = [
            *_of_inputs(inputs, forward),
            _rows("out", out, forward.out),
            _rows("grad_out", grad_out, problem.grad_out),
            _rows("grad_q", grads.q, problem.grad_q),
            _rows("grad_k", grads.k, problem.grad_k),
            _rows("grad_v", grads.v, problem.grad_v),
        ]
        _say("attention_bwd", forward, verdict, rows, said)
        launch(inputs, out, lse, grad_out, grad_lse, grads)

    return followed


def _say(op: str, problem: Problem, verdict: Verdict, rows: list[Rows], said: set[str]) -> None:
    """One line per outcome: the same shape may come at other addresses."""
    how = _how(problem, verdict, rows)
    if how in said:
        return
    said.add(how)
    heads = f"{problem.heads_q} heads"
    if problem.heads_kv != problem.heads_q:
        heads += f" on {problem.heads_kv}"
    _log.debug(
        "%s %s, batch %d, %d queries, %d keys, %s of %s: %s",
        op,
        problem.dtype,
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        heads,
        pair_words(problem.head_dim, problem.head_dim_v),
        how,
    )


def _how(problem: Problem, verdict: Verdict, rows: list[Rows]) -> str:
    if verdict.kernel is not None:
        choice = families.choose(verdict.kernel, rows, _special(problem))
        return f"{verdict.candidate}, {choice.family}: {choice.reason}"
    misplaced = families.unaligned(rows)
    if verdict.backend == "triton" and misplaced is not None:
        return f"triton, after copies, for rows of {misplaced}"
    return verdict.candidate


def _of_inputs(inputs: Inputs, problem: Problem) -> list[Rows]:
    return [
        _rows("q", inputs.q, problem.q),
        _rows("k", inputs.k, problem.k),
        _rows("v", inputs.v, problem.v),
    ]


def _rows(name: str, tensor: torch.Tensor, strides: Strides) -> Rows:
    return Rows(name, tensor.data_ptr(), *strides)


def _special(problem: Problem) -> Iterator[str]:
    """What the call has beside plain dense attention."""
    if problem.total_q is not None or problem.total_k is not None or problem.has_seqused_k:
        yield families.PACKED
    if problem.total_q is not None and problem.total_q < families.FEWEST_ROWS * problem.batch:
        yield families.SHORT
    there = (
        problem.bias is not None,
        problem.alibi_batch_stride is not None,
        problem.softcap != 0,
        problem.dropout_p > 0,
    )
    yield from compress(families.FEATURES, there)
    if problem.deterministic:
        yield families.DETERMINISTIC
