"""Who can run an op: one module per backend, imported when it is first chosen.

A backend is asked once per problem to prepare a launch, and the launch is called once per call; so
whatever depends on shapes and strides alone is computed in `prepare_*` and never again.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, Protocol, cast

if TYPE_CHECKING:
    import torch

    from flashvar.ops.attention.problem import BackwardProblem, Gradients, Inputs, Problem
    from flashvar.selection.request import Verdict

BACKENDS: Final = {
    "cuda": "flashvar.backends.cuda.attention",
    "triton": "flashvar.backends.triton",
    "reference": "flashvar.backends.reference",
}


class Launch(Protocol):
    """Writes attention of one problem into `out` and, unless it is None, `lse`."""

    def __call__(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Enqueue and return; tensors come in the user's layout."""
        ...


class BackwardLaunch(Protocol):
    """Writes every element of the gradients, and adds to that of the bias."""

    def __call__(
        self,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grads: Gradients,
    ) -> None:
        """Enqueue and return; tensors come in the user's layout."""
        ...


class Backend(Protocol):
    """What a backend module holds."""

    def prepare_attention_fwd(self, problem: Problem, verdict: Verdict) -> Launch:
        """Make the launch of a problem that is not empty."""
        ...

    def prepare_attention_bwd(self, problem: BackwardProblem, verdict: Verdict) -> BackwardLaunch:
        """Make the launch of a backward that is not empty."""
        ...


def backend(name: str) -> Backend:
    """The module of a backend; KeyError for a name that is not in BACKENDS."""
    return cast("Backend", importlib.import_module(BACKENDS[name]))
