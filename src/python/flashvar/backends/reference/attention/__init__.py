"""Attention in plain torch operations, for any device, slow.

For CPU tensors, and for tensors of any device when named. Computes in float32, or in float64 for
float64 inputs. Scores are held for one chunk of query rows at a time, so memory is linear in the
length of k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashvar.backends.reference.attention.backward import attention_bwd
from flashvar.backends.reference.attention.forward import attention_fwd

if TYPE_CHECKING:
    import torch

    from flashvar.ops.attention.problem import (
        BackwardLaunch,
        BackwardProblem,
        Gradients,
        Inputs,
        Launch,
        Problem,
    )
    from flashvar.selection.candidates import CandidateResult


def prepare_forward(problem: Problem, chosen: CandidateResult) -> Launch:
    """The launch of a problem."""
    del chosen

    def launch(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        attention_fwd(problem, inputs, out, lse)

    return launch


def prepare_backward(problem: BackwardProblem, chosen: CandidateResult) -> BackwardLaunch:
    """The launch of a backward; the order of sums is fixed, so it is deterministic."""
    del chosen

    def launch(
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
        delta: torch.Tensor | None = None,
    ) -> None:
        attention_bwd(problem.forward, inputs, out, lse, grad_out, grad_lse, grads, delta)

    return launch
