"""What attention should give, and how far from it a kernel may be.

The oracle is attention written out in float64. The budget is eager attention in the inputs' own
dtype: a kernel may err twice as much, plus one rounding of a 16-bit output; wide ones may be summed
in another order, which is a few roundings more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Bytes of an element -> roundings that are allowed on top of the budget.
_ROUNDINGS = {2: 1, 4: 32, 8: 32}


@dataclass(frozen=True)
class Call:
    """Inputs [batch, sequence, heads, head_dim] and options of one call; `rows` picks queries."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool = False
    scale: float | None = None
    rows: torch.Tensor | None = None

    @property
    def factor(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def hidden(self) -> torch.Tensor:
        """[rows, seqlen_k]: True where the causal mask, aligned bottom-right, hides a key."""
        seqlen_q, seqlen_k, device = self.q.shape[1], self.k.shape[1], self.q.device
        rows = torch.arange(seqlen_q, device=device) if self.rows is None else self.rows
        keys = torch.arange(seqlen_k, device=device)
        return keys > rows[:, None] + (seqlen_k - seqlen_q)

    def written_out(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Out, log-sum-exp [batch, heads, rows] and masked scores, all steps in `dtype`."""
        group = self.q.shape[2] // self.k.shape[2]
        q = self.q if self.rows is None else self.q[:, self.rows]
        q = q.transpose(1, 2).to(dtype)
        k = self.k.transpose(1, 2).to(dtype).repeat_interleave(group, 1)
        v = self.v.transpose(1, 2).to(dtype).repeat_interleave(group, 1)
        scores = (q @ k.mT) * self.factor
        if self.causal:
            scores = scores.masked_fill(self.hidden(), -torch.inf)
        weights = scores.softmax(-1)
        if self.causal:
            # softmax of a row that sees nothing is 0 / 0.
            weights = weights.masked_fill(self.hidden().all(-1, keepdim=True), 0.0)
        return (weights @ v).transpose(1, 2), scores.logsumexp(-1), scores


def assert_right(call: Call, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Compare a kernel's output, and its log-sum-exp, with the oracle within the budget."""
    expected, expected_lse, scores = call.written_out(torch.float64)
    eager, _, _ = call.written_out(out.dtype)
    assert out.shape == expected.shape
    assert out.isfinite().all(), f"{int((~out.isfinite()).sum())} elements are not finite"
    rounding = _ROUNDINGS[out.dtype.itemsize] * torch.finfo(out.dtype).eps / 2 * expected.abs()
    error, budget = (out.double() - expected).abs(), (eager.double() - expected).abs()
    for name, found, allowed, floor in (
        ("largest", error.amax(), budget.amax(), rounding.amax()),
        ("mean", error.mean(), budget.mean(), rounding.mean()),
    ):
        limit = 2 * allowed + floor
        assert found <= limit, f"{name} error {found:.3g}, eager {allowed:.3g}, limit {limit:.3g}"
    if lse is not None:
        assert_lse_right(lse, expected_lse, scores)


def assert_lse_right(lse: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor) -> None:
    """Float32 sums of scores as large as these may be off by this much; -inf must be -inf."""
    assert lse.shape == expected.shape
    assert lse.dtype in (torch.float32, torch.float64)
    empty = expected == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    largest = scores.masked_fill(scores == -torch.inf, 0.0).abs().amax()
    error = (lse.double() - expected).masked_fill(empty, 0.0).abs().amax()
    limit = 2e-5 + 1e-5 * largest
    assert error <= limit, f"log-sum-exp is off by {error:.3g}, limit {limit:.3g}"
