"""What a call of causal_conv1d is, as backends see it.

Each channel of a sequence is convolved with its own weights, and nothing of a later token counts:

    z[t] = bias + sum(weight[j] * x[t - (width - 1) + j] for j in range(width))
    y[t] = activation(z[t]) + residual[t]

A state is what came before a sequence, the newest in its last column: x[-c] is
state[..., columns - c]. Before that, and without a state, x is 0. Sums are float32, or float64 for
float64 tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from flashvar.selection.candidates import CandidateResult


@dataclass(frozen=True, slots=True)
class Convolution:
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


@dataclass(frozen=True, slots=True)
class Gradients:
    """Where a backward writes; None is not wanted. Those of weight, bias and state contiguous."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    state: torch.Tensor | None


class Backend(Protocol):
    """What a backend module holds. Tensors are views in the order of Convolution."""

    def forward(
        self,
        chosen: CandidateResult,
        conv: Convolution,
        residual: torch.Tensor | None,
        y: torch.Tensor,
        final_state: torch.Tensor,
    ) -> None:
        """Write the output, and the final state, which may have no columns."""
        ...

    def backward(
        self,
        chosen: CandidateResult,
        conv: Convolution,
        grad_y: torch.Tensor,
        grad_final: torch.Tensor | None,
        grads: Gradients,
    ) -> None:
        """Write the gradients."""
        ...

    def update(
        self,
        chosen: CandidateResult,
        conv: Convolution,
        residual: torch.Tensor | None,
        state_indices: torch.Tensor | None,
        state_positions: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """Write the output, and move the tokens of x into the state.

        With positions states are circular buffers: x[t] of a sequence goes to column
        (position + t) % columns, and x[-c] stands in column (position - c) % columns. A sequence
        whose index is negative gives 0, one whose index is beyond the pool NaN.
        """
        ...
