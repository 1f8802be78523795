"""The recurrence token by token, and its derivative: the definition of the op.

For a token, with the state S before it and the gradient dS of the state after it,

    S' = exp(g) S;  r = v - S'^T k;  u = beta r;  S = S' + k u^T;  out = S^T q

    dS += q dout^T;  dq = S dout;  du = dS^T k;  dr = beta du = dv;  dbeta = r . du
    dk = dS u - S' dr;  dS' = dS - k dr^T;  dg = sum(S' * dS');  dS = exp(g) dS'
"""

from __future__ import annotations

from typing import Final

import torch

from flashvar.backends.reference.gated_delta_rule.activations import Terms

# States are kept at the first token of each segment, and computed again inside it.
_SEGMENT: Final = 64


def forward(terms: Terms, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [batch, heads, seqlen, V], and the state [batch, heads, K, V] after the last token."""
    out = torch.empty_like(terms.v)
    for t in range(terms.q.shape[2]):
        _, _, _, state = _step(terms, t, state)
        out[:, :, t] = _transposed(state, terms.q[:, :, t])
    return out, state


def backward(
    terms: Terms, state: torch.Tensor, grad_out: torch.Tensor, grad_final: torch.Tensor
) -> tuple[Terms, torch.Tensor]:
    """The gradients of the terms, and of the state before the first token."""
    seqlen = terms.q.shape[2]
    kept = []
    for t in range(seqlen):
        if t % _SEGMENT == 0:
            kept.append(state)
        state = _step(terms, t, state)[3]
    grads, d_state = Terms(*(torch.empty_like(x) for x in terms)), grad_final
    for segment in reversed(range(len(kept))):
        begin = segment * _SEGMENT
        end = min(begin + _SEGMENT, seqlen)
        steps = [_step(terms, begin, kept[segment])]
        for t in range(begin + 1, end):
            steps.append(_step(terms, t, steps[-1][3]))
        for t in reversed(range(begin, end)):
            d_state = _step_backward(terms, t, steps[t - begin], grad_out[:, :, t], d_state, grads)
    return grads, d_state


Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _step(terms: Terms, t: int, state: torch.Tensor) -> Step:
    """S', r, u and the state after token t."""
    k = terms.k[:, :, t]
    decayed = torch.exp(terms.g[:, :, t])[..., None, None] * state
    rest = terms.v[:, :, t] - _transposed(decayed, k)
    written = terms.beta[:, :, t, None] * rest
    return decayed, rest, written, decayed + _outer(k, written)


def _step_backward(
    terms: Terms, t: int, step: Step, d_out: torch.Tensor, d_state: torch.Tensor, grads: Terms
) -> torch.Tensor:
    """Write the gradients of token t; the gradient of the state before it."""
    decayed, rest, written, state = step
    q, k = terms.q[:, :, t], terms.k[:, :, t]
    d_state = d_state + _outer(q, d_out)
    grads.q[:, :, t] = _times(state, d_out)
    d_written = _transposed(d_state, k)
    d_rest = terms.beta[:, :, t, None] * d_written
    grads.beta[:, :, t] = (rest * d_written).sum(-1)
    grads.v[:, :, t] = d_rest
    grads.k[:, :, t] = _times(d_state, written) - _times(decayed, d_rest)
    d_decayed = d_state - _outer(k, d_rest)
    grads.g[:, :, t] = (decayed * d_decayed).sum((-2, -1))
    return torch.exp(terms.g[:, :, t])[..., None, None] * d_decayed


def _outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(-1) * y.unsqueeze(-2)


def _times(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (state * x.unsqueeze(-2)).sum(-1)


def _transposed(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (state * x.unsqueeze(-1)).sum(-2)
