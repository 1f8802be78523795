"""What a call of merge_states is, as backends see it.

With lse = log(sum(exp(lses[i]))) and w[i] = exp(lses[i] - lse),

    out = sum(w[i] * outs[i])
    grad_outs[i] = w[i] * grad_out
    grad_lses[i] = w[i] * (grad_out . (outs[i] - out) + grad_lse)

A part with w[i] = 0 counts for nothing, whatever outs[i] holds. A NaN among the lses of a row makes
it NaN; +inf among them gives lse +inf and out NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from flashvar.selection.candidates import CandidateResult


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a call as views in one order, whatever layout the user keeps.

    Each tuple has a tensor for each part, all with the same strides, or one tensor with the parts
    in front, `stacked`.
    """

    outs: tuple[torch.Tensor, ...]  # [batch, seqlen, heads, head_dim], rows contiguous
    lses: tuple[torch.Tensor, ...]  # [batch, heads, seqlen]; float32, or float64 beside float64
    stacked: bool

    @property
    def count(self) -> int:
        """How many parts."""
        return self.outs[0].shape[0] if self.stacked else len(self.outs)

    def as_stacked(self) -> Parts:
        """The same parts in one tensor each: copies of them, unless they are stacked."""
        if self.stacked:
            return self
        return Parts((torch.stack(self.outs),), (torch.stack(self.lses),), True)


class Backend(Protocol):
    """What a backend module holds. Tensors are views in the order of Parts."""

    def forward(
        self, chosen: CandidateResult, parts: Parts, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Write the merged out, and its log-sum-exp, which is contiguous."""
        ...

    def backward(
        self,
        chosen: CandidateResult,
        parts: Parts,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grad_outs: torch.Tensor,
        grad_lses: torch.Tensor,
    ) -> None:
        """Write the gradients, stacked. Those of log-sum-exps are contiguous, and read as such."""
        ...
