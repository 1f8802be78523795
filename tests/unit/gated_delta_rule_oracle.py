"""The gated delta rule in float64, token by token; its gradients are autograd's."""

from __future__ import annotations

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
    decay = g.exp()
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    cu = options.get("cu_seqlens")
    if cu is None:
        places = [(b, 0, q.shape[1]) for b in range(q.shape[0])]
    else:
        places = [(0, *ends) for ends in zip(cu.tolist(), cu.tolist()[1:], strict=False)]
    rows: dict[tuple[int, int], torch.Tensor] = {}
    finals = []
    for i, (b, begin, end) in enumerate(places):
        initial = options.get("initial_state")
        state = v.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        if initial is not None:
            state = initial[i].double()
        for t in range(begin, end):
            state = decay[b, t, :, None, None] * state
            read = torch.einsum("hkv,hk->hv", state, k[b, t])
            new = beta[b, t, :, None] * (v[b, t] - read)
            state = state + torch.einsum("hk,hv->hkv", k[b, t], new)
            rows[b, t] = scale * torch.einsum("hkv,hk->hv", state, q[b, t])
        finals.append(state)
    out = v.new_zeros(v.shape)
    if rows:
        batches = [torch.stack([rows[b, t] for t in range(v.shape[1])]) for b in range(len(v))]
        out = torch.stack(batches)
    none = v.new_zeros(0, v.shape[2], q.shape[3], v.shape[3])
    return out, torch.stack(finals) if finals else none
