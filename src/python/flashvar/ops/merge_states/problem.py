"""The types that describe a call of merge_states to backends.

With lse = log(sum(exp(lses[i]))) and w[i] = exp(lses[i] - lse),

    out = sum(w[i] * outs[i])
    grad_outs[i] = w[i] * grad_out
    grad_lses[i] = w[i] * (grad_out . (outs[i] - out) + grad_lse)

In a row a part counts for nothing, whatever outs[i] holds, where its lse is -inf or lower than the
highest by more than LOWEST: the exponential of the difference is 0 there. A NaN among the lses of a
row makes it NaN; +inf among them gives lse +inf and out NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import torch

if TYPE_CHECKING:
    from flashvar.selection.candidates import CandidateResult

# By the dtype of sums. All backends compare with these numbers, so that none of them reads what
# another ignores: e^-103.97 rounds to the least number of float32, and e^-103.98 to 0.
LOWEST: Final = MappingProxyType({torch.float32: -103.97, torch.float64: -745.13})
# Parts of a list whose gradients can be skipped one by one: their bits are a positive int32.
_MAX_SKIPPED: Final = 31


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which gradients a backward writes."""

    outs: int  # parts that the gradient of outs has
    skipped: int  # bit i: the gradient of outs[i] is none of them
    lses: bool

    @classmethod
    def of(cls, wanted: Sequence[bool], parts: int, stacked: bool) -> Wanted:
        """Make it from a flag for each tensor, outs before lses; without flags all are wanted.

        `parts` outs and lses are given. Parts of longer lists are all written if one is wanted.
        """
        half = len(wanted) // 2
        of_outs, lses = wanted[:half], any(wanted[half:]) or not wanted
        if wanted and not any(of_outs):
            return cls(0, 0, lses)
        if stacked or len(of_outs) > _MAX_SKIPPED:
            return cls(parts, 0, lses)
        skipped = sum(1 << index for index, one in enumerate(of_outs) if not one)
        return cls(parts - skipped.bit_count(), skipped, lses)

    def writes(self, part: int) -> bool:
        """Whether the gradient of a part's out is written."""
        return self.outs > 0 and not self.skipped >> part & 1


ForwardLaunch = Callable[[Parts, torch.Tensor, torch.Tensor], None]
BackwardLaunch = Callable[
    [
        Parts,
        torch.Tensor,
        "torch.Tensor | None",
        "torch.Tensor | None",
        "torch.Tensor | None",
    ],
    None,
]


class Backend(Protocol):
    """The functions of a backend module. Tensors are views in the order of Parts.

    Launches are made of the tensors of one call, and take those of every call whose shapes,
    strides, dtypes and devices are the same.
    """

    def prepare_forward(
        self, chosen: CandidateResult, parts: Parts, out: torch.Tensor, lse: torch.Tensor
    ) -> ForwardLaunch:
        """The launch that writes the merged out, and its log-sum-exp, which is contiguous."""
        ...

    def prepare_backward(
        self,
        chosen: CandidateResult,
        parts: Parts,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        grad_outs: torch.Tensor | None,
        grad_lses: torch.Tensor | None,
        skipped: int,
    ) -> BackwardLaunch:
        """The launch that writes the gradients that are wanted, stacked.

        Those of log-sum-exps are contiguous. `skipped`: bit i, the gradient of outs[i] is not
        wanted and has no place in grad_outs.
        """
        ...
