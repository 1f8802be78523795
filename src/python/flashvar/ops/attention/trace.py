"""What the log tells at debug level of each kind of call: which kernels it takes, and why.

Asked once per plan. Where the log does not want it, launches are as they were: a call costs nothing
more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flashvar.binaries.variant import pair_words

if TYPE_CHECKING:
    import torch

    from flashvar.ops.attention.problem import (
        BackwardLaunch,
        BackwardProblem,
        Gradients,
        Inputs,
        Launch,
        Problem,
        Strides,
    )
    from flashvar.selection.candidates import CandidateResult

_log: Final = logging.getLogger("flashvar")

# What Triton's kernels read at once, in bytes, and in elements of bf16 and fp16.
_PIECE: Final = 16
_STEP: Final = _PIECE // 2


@dataclass(frozen=True)
class Rows:
    """Where the rows of a tensor start: its address in bytes, its strides in elements."""

    name: str
    address: int
    batch: int
    sequence: int
    heads: int


def follow_forward(launch: Launch, problem: Problem, chosen: CandidateResult) -> Launch:
    """The launch itself, or one that says in the log how each call of it is served."""
    if not _log.isEnabledFor(logging.DEBUG):
        return launch
    said: set[str] = set()
    explain: Callable[..., str] | None = None
    if chosen.kernel is not None:
        from flashvar.backends.cuda import attention as cuda

        explain = cuda.explain_forward(problem, chosen)

    def followed(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        if explain is not None:
            how = f"{chosen.candidate}, {explain(inputs, out, lse)}"
        else:
            how = _how(chosen, [*_of_inputs(inputs, problem), _rows("out", out, problem.out)])
        _say("attention_fwd", problem, how, said)
        launch(inputs, out, lse)

    return followed


def follow_backward(
    launch: BackwardLaunch, problem: BackwardProblem, chosen: CandidateResult
) -> BackwardLaunch:
    """As `follow_forward`."""
    if not _log.isEnabledFor(logging.DEBUG):
        return launch
    said: set[str] = set()
    forward = problem.forward
    explain: Callable[..., str] | None = None
    if chosen.kernel is not None:
        from flashvar.backends.cuda import attention as cuda

        explain = cuda.explain_backward(problem, chosen)

    def followed(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
    ) -> None:
        if explain is not None:
            told = explain(inputs, out, lse, grad_out, grad_lse, grads)
            how = f"{chosen.candidate}, {told}"
        else:
            how = _how(
                chosen,
                [
                    *_of_inputs(inputs, forward),
                    _rows("out", out, forward.out),
                    _rows("grad_out", grad_out, problem.grad_out),
                    _rows("grad_q", grads.q, problem.grad_q),
                    _rows("grad_k", grads.k, problem.grad_k),
                    _rows("grad_v", grads.v, problem.grad_v),
                ],
            )
        _say("attention_bwd", forward, how, said)
        launch(inputs, out, lse, grad_out, grad_lse, grads)

    return followed


def _say(op: str, problem: Problem, how: str, said: set[str]) -> None:
    """One line per outcome: the same shape may come at other addresses."""
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


def _how(chosen: CandidateResult, rows: Iterable[Rows]) -> str:
    misplaced = _unaligned(rows)
    if chosen.backend == "triton" and misplaced is not None:
        return f"triton, after copies, for rows of {misplaced}"
    return chosen.candidate


def _unaligned(tensors: Iterable[Rows]) -> str | None:
    """The first tensor with a row that starts between two pieces, and why; None without one."""
    for rows in tensors:
        if beyond := rows.address % _PIECE:
            # Not the address itself: what the log said once it need not say of the next tensor.
            return f"{rows.name}: its address is {beyond} bytes beyond a multiple of {_PIECE}"
        for name in ("batch", "sequence", "heads"):
            stride = getattr(rows, name)
            if stride % _STEP:
                return f"{rows.name}: its {name} stride, {stride}, is no multiple of {_STEP}"
    return None


def _of_inputs(inputs: Inputs, problem: Problem) -> list[Rows]:
    return [
        _rows("q", inputs.q, problem.q),
        _rows("k", inputs.k, problem.k),
        _rows("v", inputs.v, problem.v),
    ]


def _rows(name: str, tensor: torch.Tensor, strides: Strides) -> Rows:
    return Rows(name, tensor.data_ptr(), *strides)
