"""Debug log of each kind of call: which kernels it launches, and why.

Launches are wrapped once per plan, and only where the log level is debug; otherwise logging costs a
call nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flashvar.binaries.kinds import pair_text

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

# What a load of the Triton kernels reads, in bytes, and in elements of bf16 and fp16.
_LOAD_BYTES: Final = 16
_LOAD_ELEMENTS: Final = _LOAD_BYTES // 2


@dataclass(frozen=True)
class Rows:
    """The address of a tensor in bytes and its strides in elements."""

    name: str
    address: int
    batch: int
    sequence: int
    heads: int


def logged_forward(launch: Launch, problem: Problem, chosen: CandidateResult) -> Launch:
    """The launch; at debug level wrapped, so that the log shows what runs each call."""
    if not _log.isEnabledFor(logging.DEBUG):
        return launch
    seen: set[str] = set()
    explain: Callable[..., str] | None = None
    if chosen.kernel is not None:
        from flashvar.backends.cuda import attention as cuda

        explain = cuda.explain_forward(problem, chosen)

    def logged(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        if explain is not None:
            run_by = f"{chosen.candidate}, {explain(inputs, out, lse)}"
        else:
            run_by = _run_by(chosen, [*_of_inputs(inputs, problem), _rows("out", out, problem.out)])
        log_once("attention_fwd", problem, run_by, seen)
        launch(inputs, out, lse)

    return logged


def logged_backward(
    launch: BackwardLaunch, problem: BackwardProblem, chosen: CandidateResult
) -> BackwardLaunch:
    """As `logged_forward`."""
    if not _log.isEnabledFor(logging.DEBUG):
        return launch
    seen: set[str] = set()
    forward = problem.forward
    explain: Callable[..., str] | None = None
    if chosen.kernel is not None:
        from flashvar.backends.cuda import attention as cuda

        explain = cuda.explain_backward(problem, chosen)

    def logged(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
        delta: torch.Tensor | None = None,
    ) -> None:
        if explain is not None:
            explanation = explain(inputs, out, lse, grad_out, grad_lse, grads)
            run_by = f"{chosen.candidate}, {explanation}"
        else:
            run_by = _run_by(
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
        log_once("attention_bwd", forward, run_by, seen)
        launch(inputs, out, lse, grad_out, grad_lse, grads, delta)

    return logged


def log_once(function: str, problem: Problem, run_by: str, seen: set[str]) -> None:
    """Log one line per outcome: calls of one shape differ in their addresses."""
    if run_by in seen:
        return
    seen.add(run_by)
    heads = f"{problem.heads_q} heads"
    if problem.heads_kv != problem.heads_q:
        heads += f" on {problem.heads_kv}"
    _log.debug(
        "%s %s, batch %d, %d queries, %d keys, %s of %s: %s",
        function,
        problem.dtype,
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        heads,
        pair_text(problem.head_dim, problem.head_dim_v),
        run_by,
    )


def _run_by(chosen: CandidateResult, rows: Iterable[Rows]) -> str:
    unaligned = _unaligned(rows)
    if chosen.backend == "triton" and unaligned is not None:
        return f"triton, after copies, for rows of {unaligned}"
    return chosen.candidate


def _unaligned(tensors: Iterable[Rows]) -> str | None:
    """The first tensor with rows that are not 16-byte aligned, and why; None if all are."""
    for rows in tensors:
        if offset := rows.address % _LOAD_BYTES:
            # Not the address itself, so that the line is the same for the next tensor.
            return f"{rows.name}: its address is {offset} bytes beyond a multiple of {_LOAD_BYTES}"
        for name in ("batch", "sequence", "heads"):
            stride = getattr(rows, name)
            if stride % _LOAD_ELEMENTS:
                return (
                    f"{rows.name}: its {name} stride, {stride}, is no multiple of {_LOAD_ELEMENTS}"
                )
    return None


def _of_inputs(inputs: Inputs, problem: Problem) -> list[Rows]:
    return [
        _rows("q", inputs.q, problem.q),
        _rows("k", inputs.k, problem.k),
        _rows("v", inputs.v, problem.v),
    ]


def _rows(name: str, tensor: torch.Tensor, strides: Strides) -> Rows:
    return Rows(name, tensor.data_ptr(), *strides)
