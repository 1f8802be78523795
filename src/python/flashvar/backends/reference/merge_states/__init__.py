"""merge_states in plain torch operations: float32 throughout, float64 for float64 inputs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from flashvar.backends.reference.merge_states import formula

if TYPE_CHECKING:
    import torch

    from flashvar.ops.merge_states.problem import BackwardLaunch, ForwardLaunch, Parts
    from flashvar.selection.candidates import CandidateResult


def prepare_forward(
    chosen: CandidateResult, parts: Parts, out: torch.Tensor, lse: torch.Tensor
) -> ForwardLaunch:
    """The launch that writes the merged out and its log-sum-exp."""
    return _forward


def _forward(parts: Parts, out: torch.Tensor, lse: torch.Tensor) -> None:
    merged, merged_lse = formula.forward(parts)
    out.copy_(merged)
    lse.copy_(merged_lse)


def prepare_backward(
    chosen: CandidateResult,
    parts: Parts,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_outs: torch.Tensor | None,
    grad_lses: torch.Tensor | None,
    skipped: int,
) -> BackwardLaunch:
    """The launch that writes the gradients that are wanted, stacked."""
    return partial(_backward, skipped)


def _backward(
    skipped: int,
    parts: Parts,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grad_outs: torch.Tensor | None,
    grad_lses: torch.Tensor | None,
) -> None:
    of_outs, of_lses = formula.backward(parts, grad_out, grad_lse)
    if grad_outs is not None:
        kept = (one for index, one in enumerate(of_outs) if not skipped >> index & 1)
        for to, one in zip(grad_outs, kept, strict=True):
            to.copy_(one)
    if grad_lses is not None:
        grad_lses.copy_(of_lses)
