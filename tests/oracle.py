"""What attention and its gradients should be, and how far from them a kernel may be.

The oracle is the formula written out in float64; gradients are autograd's of it, and the dropout
mask comes from a Philox of its own, so nothing is shared with what is tested. The budget is the
same formula in the inputs' own dtype (eager attention): a kernel may err twice as much, in
gradients three times, plus one rounding of a 16-bit result; wide ones may be summed in another
order, which is a few roundings more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from philox import dropped, kept

# Bytes of an element -> roundings that are allowed on top of the budget.
_ROUNDINGS = {2: 1, 4: 32, 8: 32}
# Share of the mean error that may lie on one side.
_LEAN = 0.35


class Answer(NamedTuple):
    """Out and log-sum-exp in the shapes that a call returns, and its masked scores."""

    out: torch.Tensor
    lse: torch.Tensor
    scores: torch.Tensor  # [batch, heads, rows, seqlen_k]; flat where sequences are packed


class Part(NamedTuple):
    """One sequence of a packed call, and the rows of q and of k that it is."""

    call: Call
    rows_q: slice
    rows_k: slice


@dataclass(frozen=True)
class Call:
    """Inputs [batch, sequence, heads, head_dim] and options of one call; `rows` picks queries.

    With `cu_seqlens_q` sequences are packed, [total, heads, head_dim]; keys are packed too, or
    dense where `cu_seqlens_k` is None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool = False
    scale: float | None = None
    rows: torch.Tensor | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    first_batch: int = 0  # the number of the first batch entry, where this is a part of a call

    @property
    def factor(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def out_shape(self) -> torch.Size:
        return torch.Size((*self.q.shape[:-1], self.v.shape[-1]))

    def hidden(self) -> torch.Tensor:
        """[rows, seqlen_k]: True where causality or the window, aligned bottom-right, hides."""
        seqlen_q, seqlen_k, device = self.q.shape[1], self.k.shape[1], self.q.device
        rows = torch.arange(seqlen_q, device=device) if self.rows is None else self.rows
        keys = torch.arange(seqlen_k, device=device)
        diagonal = rows[:, None] + (seqlen_k - seqlen_q)
        left, right = self.window[0], 0 if self.causal else self.window[1]
        hidden = torch.zeros_like(diagonal - keys, dtype=torch.bool)
        if left >= 0:
            hidden |= keys < diagonal - left
        if right >= 0:
            hidden |= keys > diagonal + right
        return hidden

    def parts(self) -> Iterator[Part]:
        """The sequences of a packed call, each as a dense call of batch 1."""
        assert self.cu_seqlens_q is not None
        bounds_q = self.cu_seqlens_q.tolist()
        bounds_k = None if self.cu_seqlens_k is None else self.cu_seqlens_k.tolist()
        used = None if self.seqused_k is None else self.seqused_k.tolist()
        for number in range(len(bounds_q) - 1):
            first, length = 0, self.k.shape[1]
            if bounds_k is not None:
                first, length = bounds_k[number], bounds_k[number + 1] - bounds_k[number]
            rows_q = slice(bounds_q[number], bounds_q[number + 1])
            rows_k = slice(first, first + (length if used is None else used[number]))
            k = self.k[rows_k][None] if bounds_k else self.k[number : number + 1, rows_k]
            v = self.v[rows_k][None] if bounds_k else self.v[number : number + 1, rows_k]
            slopes = self.alibi_slopes
            if slopes is not None and slopes.ndim > 1:
                slopes = slopes[number : number + 1]
            part = replace(
                self,
                q=self.q[rows_q][None],
                k=k,
                v=v,
                alibi_slopes=slopes,
                cu_seqlens_q=None,
                cu_seqlens_k=None,
                seqused_k=None,
                first_batch=number,
            )
            yield Part(part, rows_q, rows_k)

    def written_out(self, dtype: torch.dtype) -> Answer:
        """Attention of these inputs, every step in `dtype`; rows of no sequence give 0 and -inf."""
        if self.cu_seqlens_q is None:
            return self._dense(dtype)
        out = self.q.new_zeros(self.out_shape, dtype=dtype)
        lse = self.q.new_full((self.q.shape[1], self.q.shape[0]), -torch.inf, dtype=dtype)
        scores = []
        for part, rows, _ in self.parts():
            answer = part._dense(dtype)
            out[rows] = answer.out[0]
            lse[:, rows] = answer.lse[0]
            scores.append(answer.scores.flatten())
        return Answer(out, lse, torch.cat(scores))

    def _dense(self, dtype: torch.dtype) -> Answer:
        group = self.q.shape[2] // self.k.shape[2]
        q = self.q if self.rows is None else self.q[:, self.rows]
        q = q.transpose(1, 2).to(dtype)
        k = self.k.transpose(1, 2).to(dtype).repeat_interleave(group, 1)
        v = self.v.transpose(1, 2).to(dtype).repeat_interleave(group, 1)
        scores = self.added((q @ k.mT) * self.factor, dtype)
        scores = scores.masked_fill(self.hidden(), -torch.inf)
        keys = scores.shape[-1]
        if self.sinks is not None:  # one more column, whose value nobody has
            column = self.sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column], -1)
        # Softmax of a row that sees nothing is 0 / 0: such rows are set aside, gradients too.
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        seen = scores.masked_fill(blind, 0.0)
        if scores.shape[-1] == 0:
            lse = scores.new_full(scores.shape[:-1], -torch.inf)
        else:
            lse = seen.logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)
        weights = seen.softmax(-1).masked_fill(blind, 0.0)[..., :keys]
        if self.dropout_p > 0:
            weights = weights * self.kept().to(dtype) / (1 - dropped(self.dropout_p) / 2**16)
        return Answer((weights @ v).transpose(1, 2), lse, scores)

    def added(self, scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Scores [batch, heads, rows, seqlen_k] after the softcap, the bias and ALiBi."""
        seqlen_q, seqlen_k = self.q.shape[1], self.k.shape[1]
        rows = slice(None) if self.rows is None else self.rows
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias[:, :, rows].to(dtype)
        if self.alibi_slopes is not None:
            queries = torch.arange(seqlen_q, device=scores.device)[rows]
            keys = torch.arange(seqlen_k, device=scores.device)
            distance = (queries[:, None] + seqlen_k - seqlen_q - keys).abs()
            scores = scores - (self.alibi_slopes.double()[..., None, None] * distance).to(dtype)
        return scores

    def kept(self) -> torch.Tensor:
        """[batch, heads, rows, seqlen_k]: True where dropout keeps the weight."""
        assert self.rng_state is not None
        seed, offset = self.rng_state.tolist()
        batch, seqlen_q, heads, _ = self.q.shape
        shape = (batch, heads, seqlen_q, self.k.shape[1])
        mask = kept(shape, self.dropout_p, seed, offset, self.first_batch * heads)
        mask = mask if self.rows is None else mask[:, :, self.rows.cpu()]
        return mask.to(self.q.device)

    def gradients(
        self,
        dtype: torch.dtype,
        grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Gradients of q, k, v (and bias, sinks), by autograd through the formula in `dtype`."""
        leaves = {
            name: tensor.detach().to(dtype, copy=True).requires_grad_()
            for name in ("q", "k", "v", "bias", "sinks")
            if (tensor := getattr(self, name)) is not None
        }
        answer = replace(self, **leaves).written_out(dtype)
        wanted = [
            (output, grad.to(dtype))
            for output, grad in ((answer.out, grad_out), (answer.lse, grad_lse))
            if grad is not None and output.requires_grad
        ]
        if not wanted:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        outputs, grads = zip(*wanted, strict=True)
        # A row whose log-sum-exp is -inf has no derivative of it.
        found = torch.autograd.grad(
            outputs, list(leaves.values()), grads, allow_unused=True, materialize_grads=True
        )
        return dict(zip(leaves, found, strict=True))


def assert_right(call: Call, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Compare a kernel's output, and its log-sum-exp, with the oracle within the budget."""
    expected = call.written_out(torch.float64)
    eager = call.written_out(out.dtype).out
    _assert_near("out", out, expected.out, eager, 2, 0.0)
    if lse is not None:
        assert_lse_right(lse, expected.lse, expected.scores)


def assert_gradients_right(
    call: Call,
    found: Mapping[str, torch.Tensor | None],
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None = None,
) -> None:
    """Compare gradients, by input, with the oracle's; None stands for one that nobody wanted."""
    dtype = call.q.dtype
    expected = call.gradients(torch.float64, grad_out, grad_lse)
    eager = call.gradients(dtype, grad_out, grad_lse)
    moved = dict.fromkeys(expected, 0.0)
    if grad_out is not None:
        # Kernels take rowsum(dO * O) from the rounded out. It enters as the gradient of the
        # log-sum-exp does, so this is what one rounding of out moves.
        out = call.written_out(torch.float64).out
        rounding = torch.finfo(dtype).eps * (out * grad_out.double()).norm(dim=-1)
        moved = call.gradients(torch.float64, None, rounding.transpose(-1, -2))
    for name, grad in found.items():
        if grad is not None:
            _assert_near(f"d{name}", grad, expected[name], eager[name], 3, abs(moved[name]))


def _assert_near(
    name: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    eager: torch.Tensor,
    times: float,
    floor: torch.Tensor | float,
) -> None:
    """The largest and the mean error are within the budget, and errors do not lean to one side."""
    assert found.shape == expected.shape, f"{name} is {found.shape}, not {expected.shape}"
    assert found.isfinite().all(), f"{name}: {int((~found.isfinite()).sum())} are not finite"
    if found.numel() == 0:
        return
    rounding = _ROUNDINGS[found.dtype.itemsize] * torch.finfo(found.dtype).eps / 2
    floor = rounding * expected.abs() + floor
    signed, budget = found.double() - expected, (eager.double() - expected).abs()
    error = signed.abs()
    for kind, is_, may, rest in (
        ("largest", error.amax(), budget.amax(), floor.amax()),
        ("mean", error.mean(), budget.mean(), floor.mean()),
    ):
        limit = times * may + rest
        assert is_ <= limit, f"{name}: {kind} error {is_:.3g}, eager {may:.3g}, limit {limit:.3g}"
    if found.dtype.itemsize > 2:
        return
    # Rounding to nearest leaves as many results too large as too small: |lean| is below a tenth of
    # the mean error. Truncating P, dS or the result makes it six tenths or more.
    # Equal results have one error between them, and equal weights round alike, also in eager.
    rows = expected.unique().numel() / found.shape[-1]
    lean = (signed * expected.sign()).mean().abs()
    limit = _LEAN * error.mean() + 4 * error.square().mean().sqrt() / rows**0.5
    limit = limit + times * ((eager.double() - expected) * expected.sign()).mean().abs()
    assert lean <= limit, f"{name}: errors lean by {lean:.3g} to one side, limit {limit:.3g}"


def assert_lse_right(lse: torch.Tensor, expected: torch.Tensor, scores: torch.Tensor) -> None:
    """Float32 sums of scores as large as these may be off by this much; -inf must be -inf."""
    assert lse.shape == expected.shape
    assert lse.dtype in (torch.float32, torch.float64)
    empty = expected == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    if lse.numel() == 0 or scores.numel() == 0:
        return
    largest = scores.masked_fill(scores == -torch.inf, 0.0).abs().amax()
    error = (lse.double() - expected).masked_fill(empty, 0.0).abs().amax()
    limit = 2e-5 + 1e-5 * largest
    assert error <= limit, f"log-sum-exp is off by {error:.3g}, limit {limit:.3g}"
