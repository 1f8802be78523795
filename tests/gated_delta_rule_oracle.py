"""The gated delta rule in float64, token by token; its gradients are autograd's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import softplus


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [batch, seqlen, heads, V] and the final states [sequences, heads, K, V]."""
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    scale = options.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if options.get("qk_l2norm"):
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if options.get("beta_sigmoid"):
        beta = torch.sigmoid(beta) * (2 if options.get("allow_neg_eigval") else 1)
    g = torch.zeros_like(beta) if g is None else g.double()
    if (a_log := options.get("A_log")) is not None:
        bias = options.get("dt_bias")
        g = -a_log.double().exp() * softplus(g if bias is None else g + bias.double())
    group = v.shape[2] // q.shape[2]
    q, k = scale * q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    rows = tuple(x.unbind(1) for x in (q, k, v, beta, g.exp()))
    initial = options.get("initial_state")
    cu = options.get("cu_seqlens")
    count = len(v) if cu is None else len(cu) - 1
    if initial is None:
        initial = v.new_zeros(count, v.shape[2], q.shape[3], v.shape[3])
    if cu is None:
        outs, finals = _sequences(rows, 0, v.shape[1], initial.double())
        return torch.stack(outs, 1) if outs else v.new_zeros(v.shape), finals
    ends = [int(end) for end in cu]  # tolist of torch 2.8 fails inside of torch.func.grad
    out, states = list(v.new_zeros(v.shape).unbind(1)), []
    for i, (begin, end) in enumerate(pairwise(ends)):
        out[begin:end], final = _sequences(rows, begin, end, initial[i : i + 1].double())
        states.append(final)
    none = v.new_zeros(0, *initial.shape[1:])
    return torch.stack(out, 1) if out else v.new_zeros(v.shape), torch.cat(states or [none])


def _sequences(
    rows: tuple[tuple[torch.Tensor, ...], ...], begin: int, end: int, state: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outs of tokens, each [sequences, heads, V], and the states after the last."""
    outs = []
    for t in range(begin, end):
        q, k, v, beta, decay = (x[t] for x in rows)
        state = decay[..., None, None] * state
        new = beta[..., None] * (v - (state * k[..., None]).sum(-2))
        state = state + k[..., None] * new[..., None, :]
        outs.append((state * q[..., None]).sum(-2))
    return outs, state
