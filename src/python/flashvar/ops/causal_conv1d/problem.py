"""The types that describe a call of causal_conv1d to backends.

Each channel of a sequence is convolved with its own weights, and nothing of a later token counts:

    z[t] = bias + sum(weight[j] * x[t - (width - 1) + j] for j in range(width))
    y[t] = activation(z[t]) + residual[t]

A state is what came before a sequence, the newest in its last column: x[-c] is
state[..., columns - c]. Before that, and without a state, x is 0. Sums are float32, or float64 for
float64 tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from flashvar.selection.candidates import CandidateResult


class Convolution(NamedTuple):
    """The inputs of a call as views in one order, whatever layout the user keeps."""

    x: torch.Tensor  # [batch, seqlen, dim]; packed: [1, total, dim]
    weight: torch.Tensor  # [dim, width]
    bias: torch.Tensor | None  # [dim]
    state: torch.Tensor | None  # [sequences, dim, columns]; the pool of an update
    cu_seqlens: torch.Tensor | None  # [sequences + 1], contiguous; None: each of the batch is one
    silu: bool

    @property
    def width(self) -> int:
        """How many tokens an output depends on."""
        width: int = self.weight.shape[1]
        return width

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        count: int = self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return count


# `Convolution._make`, three times as fast.
make_convolution: Final[Callable[[tuple[Any, ...]], Convolution]] = partial(
    tuple.__new__, Convolution
)


class Gradients(NamedTuple):
    """Where a backward writes; None is not wanted. Those of weight, bias and state contiguous."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor | None


# Launches of calls that differ only in the addresses of their tensors.
# conv, residual, y, final_state; binaries take None for one without columns.
ForwardLaunch: TypeAlias = Callable[[Convolution, torch.Tensor | None, torch.Tensor, Any], None]
# conv, grad_y, grad_final, grads.
BackwardLaunch: TypeAlias = Callable[
    [Convolution, torch.Tensor, torch.Tensor | None, Gradients], None
]
# conv, residual, state_indices, state_positions, y.
UpdateLaunch: TypeAlias = Callable[
    [Convolution, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor], None
]


class Backend(Protocol):
    """The functions of a backend module. Tensors are views in the order of Convolution."""

    def prepare_forward(
        self,
        chosen: CandidateResult,
        conv: Convolution,
        residual: torch.Tensor | None,
        y: torch.Tensor,
        final_state: torch.Tensor,
    ) -> ForwardLaunch:
        """The launch that writes the output, and the final state, which may have no columns."""
        ...

    def prepare_backward(
        self,
        chosen: CandidateResult,
        conv: Convolution,
        grad_y: torch.Tensor,
        grad_final: torch.Tensor | None,
        grads: Gradients,
    ) -> BackwardLaunch:
        """The launch that writes the gradients."""
        ...

    def prepare_update(
        self,
        chosen: CandidateResult,
        conv: Convolution,
        residual: torch.Tensor | None,
        state_indices: torch.Tensor | None,
        state_positions: torch.Tensor | None,
        y: torch.Tensor,
    ) -> UpdateLaunch:
        """The launch that writes the output, and moves the tokens of x into the state.

        With positions states are circular buffers: x[t] of a sequence goes to column
        (position + t) % columns, and x[-c] stands in column (position - c) % columns. A sequence
        whose index is negative gives 0, one whose index is beyond the pool NaN.
        """
        ...
