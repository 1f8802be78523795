"""Computes what the recurrence reads (normalized q and k, gates, beta), and its derivative.

Everything is wide, float32 or float64, and heads first: [batch, heads, seqlen, ...].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from flashvar.ops.gated_delta_rule.problem import L2NORM_EPS, Gradients, Inputs


class Terms(NamedTuple):
    """The terms of the recurrence, or their gradients."""

    q: torch.Tensor  # [batch, heads, seqlen, K], times scale
    k: torch.Tensor  # [batch, heads, seqlen, K]
    v: torch.Tensor  # [batch, heads, seqlen, V]
    g: torch.Tensor  # [batch, heads, seqlen]
    beta: torch.Tensor  # [batch, heads, seqlen]

    def rows(self, begin: int, end: int) -> Terms:
        """The terms of the tokens from `begin` to `end`."""
        return Terms(*(x[:, :, begin:end] for x in self))


def wide_dtype(inputs: Inputs) -> torch.dtype:
    """The dtype in which everything is computed."""
    return torch.promote_types(inputs.q.dtype, torch.float32)


def forward(inputs: Inputs) -> Terms:
    """The terms of a call."""
    wide = wide_dtype(inputs)
    q, k = (_normalized(x.to(wide), inputs)[0] for x in (inputs.q, inputs.k))
    beta = inputs.beta.to(wide)
    if inputs.beta_sigmoid:
        beta = _beta_scale(inputs) * beta.sigmoid()
    g = _gate(inputs, wide)
    terms = (
        (q * inputs.scale).repeat_interleave(inputs.group, 2),
        k.repeat_interleave(inputs.group, 2),
        *(inputs.v.to(wide), g, beta),
    )
    return Terms(*(x.transpose(1, 2) for x in terms))


def backward(inputs: Inputs, grads: Terms, grad_state: torch.Tensor | None) -> Gradients:
    """The gradients of a call's inputs, from those of its terms."""
    wide = wide_dtype(inputs)
    of_q, of_k, of_v, of_g, of_beta = (x.transpose(1, 2) for x in grads)
    of_q = _normalized_backward(inputs.q.to(wide), of_q * inputs.scale, inputs)
    of_k = _normalized_backward(inputs.k.to(wide), of_k, inputs)
    if inputs.beta_sigmoid:
        half = inputs.beta.to(wide).sigmoid()
        of_beta = _beta_scale(inputs) * of_beta * half * (1 - half)
    of_a_log = of_dt_bias = None
    if inputs.a_log is not None:
        x, rate = _raw_gate(inputs, wide), -inputs.a_log.to(wide).exp()
        # A gate of -inf forgets all: nothing depends on how it came about.
        of_a_log = torch.where(of_g == 0, 0, of_g * rate * softplus(x)).sum((0, 1))
        of_g = torch.where(of_g == 0, 0, of_g * rate * x.sigmoid())
        if inputs.dt_bias is not None:
            of_dt_bias = of_g.sum((0, 1)).to(inputs.dt_bias.dtype)
        of_a_log = of_a_log.to(inputs.a_log.dtype)
    return Gradients(
        of_q.to(inputs.q.dtype).contiguous(),
        of_k.to(inputs.k.dtype).contiguous(),
        of_v.to(inputs.v.dtype).contiguous(),
        None if inputs.g is None else of_g.to(inputs.g.dtype).contiguous(),
        of_beta.to(inputs.beta.dtype).contiguous(),
        of_a_log,
        of_dt_bias,
        grad_state,
    )


def _beta_scale(inputs: Inputs) -> int:
    return 2 if inputs.allow_neg_eigval else 1


def _raw_gate(inputs: Inputs, wide: torch.dtype) -> torch.Tensor:
    assert inputs.g is not None
    raw = inputs.g.to(wide)
    return raw if inputs.dt_bias is None else raw + inputs.dt_bias.to(wide)


def _gate(inputs: Inputs, wide: torch.dtype) -> torch.Tensor:
    if inputs.g is None:
        return torch.zeros_like(inputs.beta, dtype=wide)
    if inputs.a_log is None:
        return inputs.g.to(wide)
    return -inputs.a_log.to(wide).exp() * softplus(_raw_gate(inputs, wide))


def _normalized(x: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of length 1 and the factor that made them so."""
    if not inputs.qk_l2norm:
        return x, None
    factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
    return x * factor, factor


def _normalized_backward(x: torch.Tensor, grad: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Sums over the heads of v that share a head, then the derivative of the norm."""
    grad = grad.unflatten(2, (x.shape[2], inputs.group)).sum(3)
    y, factor = _normalized(x, inputs)
    if factor is None:
        return grad
    return factor * (grad - y * (y * grad).sum(-1, keepdim=True))
