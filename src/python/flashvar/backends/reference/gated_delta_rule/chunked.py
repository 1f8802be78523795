"""The recurrence in chunks of tokens, by matrix products: the algorithm of the chunked kernels.

For a chunk with the inclusive sums G of its gates, L = exp(G), R = exp(G[-1] - G) and
D[i, j] = exp(G[i] - G[j]) for j <= i, else 0:

    A = strictly_lower(beta K K^T);  T = inverse(I + A), which has no gate in it
    W = V - L (K S);  N = (T D) (beta W);  P = (Q K^T) D
    out = L (Q S) + P N;  S_next = exp(G[-1]) S + K^T (R N)

N are the updates u of the recurrence. T is computed by forward substitution: the doubling
(I - A)(I + A^2)... loses all digits for equal keys with beta near 2. exp(-G) is never computed: it
overflows. In src/cuda (gated_delta_rule/chunk.h) L is called a, R is b and N is U.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch.nn.functional import pad

from flashvar.backends.reference.gated_delta_rule.activations import Terms

CHUNK: Final = 64
# Gates are clamped to it, so that their sums stay finite. Its exp is 0 in float32, and below every
# result in float64.
_LOWEST_GATE: Final = {torch.float32: -104.0, torch.float64: -746.0}


class _Chunk(NamedTuple):
    """A chunk's matrices; the last three depend on the state before it."""

    gated: torch.Tensor  # [..., C]: whether the gate is above the clamp
    q: torch.Tensor
    k: torch.Tensor
    beta: torch.Tensor  # [..., C, 1]
    left: torch.Tensor  # L [..., C, 1]
    right: torch.Tensor  # R [..., C, 1]
    total_decay: torch.Tensor  # exp(G[-1]) [..., 1, 1]
    decay: torch.Tensor  # D [..., C, C]
    inverse: torch.Tensor  # T [..., C, C]
    scores: torch.Tensor  # P [..., C, C]
    state: torch.Tensor  # S [..., K, V]
    residual: torch.Tensor  # W [..., C, V]
    updates: torch.Tensor  # N [..., C, V]


def forward(terms: Terms, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [batch, heads, seqlen, V], and the state [batch, heads, K, V] after the last token."""
    outs = [terms.v[:, :, :0]]
    for chunk_terms in _chunks(terms):
        c = _chunk(chunk_terms, state)
        outs.append(c.left * (c.q @ state) + c.scores @ c.updates)
        state = _next(c)
    return torch.cat(outs, 2)[:, :, : terms.v.shape[2]], state


def backward(
    terms: Terms, state: torch.Tensor, grad_out: torch.Tensor, grad_final: torch.Tensor
) -> tuple[Terms, torch.Tensor]:
    """The gradients of the terms, and of the state before the first token."""
    seqlen = terms.v.shape[2]
    states = [state]
    chunks = _chunks(terms)
    for chunk_terms in chunks:
        states.append(_next(_chunk(chunk_terms, states[-1])))
    padded = pad(grad_out, (0, 0, 0, -seqlen % CHUNK))
    d_state, found = grad_final, [Terms(*(x[:, :, :0] for x in terms))]
    for i in reversed(range(len(chunks))):
        d_out = padded[:, :, i * CHUNK : (i + 1) * CHUNK]
        grads, d_state = _chunk_backward(_chunk(chunks[i], states[i]), d_out, d_state)
        found.insert(1, grads)
    joined = (torch.cat(parts, 2)[:, :, :seqlen] for parts in zip(*found, strict=True))
    return Terms(*joined), d_state


def _chunks(terms: Terms) -> list[Terms]:
    """The terms of each chunk. The last is padded with tokens that have no effect, of zeros."""
    more = -terms.q.shape[2] % CHUNK
    padded = Terms(*(pad(x, (0, 0, 0, more) if x.dim() == 4 else (0, more)) for x in terms))
    return [padded.rows(t, t + CHUNK) for t in range(0, padded.q.shape[2], CHUNK)]


def _chunk(terms: Terms, state: torch.Tensor) -> _Chunk:
    q, k, v, g, beta = terms
    # Sums in float64: in float32, differences of large sums would have few digits.
    sums = g.clamp(min=_LOWEST_GATE[g.dtype]).double().cumsum(-1)
    between = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    decay = between.tril().to(g.dtype).exp().tril()
    to_end = (sums[..., -1:] - sums).to(g.dtype)
    beta = beta.unsqueeze(-1)
    one = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    system = one + (beta * (k @ k.mT)).tril(-1)
    inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    left, right = sums.to(g.dtype).exp().unsqueeze(-1), to_end.exp().unsqueeze(-1)
    residual = v - left * (k @ state)
    updates = (inverse * decay) @ (beta * residual)
    total_decay, scores = left[..., -1:, :], (q @ k.mT) * decay
    gated = g > _LOWEST_GATE[g.dtype]
    constants = (gated, q, k, beta, left, right, total_decay, decay, inverse, scores)
    return _Chunk(*constants, state, residual, updates)


def _next(c: _Chunk) -> torch.Tensor:
    return c.total_decay * c.state + c.k.mT @ (c.right * c.updates)


def _chunk_backward(
    c: _Chunk, d_out: torch.Tensor, d_state: torch.Tensor
) -> tuple[Terms, torch.Tensor]:
    """The gradients of a chunk's terms, and of the state before it.

    The gradient of G needs no sums over [C, C]: those of dP P and dT T over rows and columns equal
    dot products of rows that are computed anyway. The diagonals are left out of both sums: no gate
    lies between a token and itself, and where gates are strong the difference of the two diagonal
    terms would be rounding error alone.
    """
    strictly = (c.inverse * c.decay).tril(-1)
    scaled = c.beta * c.residual
    d_updates = c.scores.mT @ d_out + c.right * (c.k @ d_state)
    d_scaled_before = strictly.mT @ d_updates
    d_scaled = d_scaled_before + d_updates
    d_residual = c.beta * d_scaled
    d_predicted = -c.left * d_residual
    d_product = (d_out @ c.updates.mT).tril() * c.decay
    itself = d_product.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    d_before = d_product.tril(-1)
    d_q_before, d_q_state = d_before @ c.k, c.left * (d_out @ c.state.mT)
    d_inverse = (d_updates @ scaled.mT).tril() * c.decay
    d_system = -(c.inverse.mT @ d_inverse @ c.inverse.mT).tril(-1)
    d_gram = c.beta * d_system
    d_k_later = d_before.mT @ c.q
    d_k_state = c.right * (c.updates @ d_state.mT)
    d_k_predicted = d_predicted @ c.state.mT
    d_q = d_q_before + itself * c.k + d_q_state
    d_k = d_k_later + itself * c.q + d_k_state + d_k_predicted + d_gram @ c.k + d_gram.mT @ c.k
    d_beta = (c.residual * d_scaled).sum(-1) + (d_system * (c.k @ c.k.mT)).sum(-1)
    d_sums = (
        (c.q * (d_q_before + d_q_state)).sum(-1)
        - (c.k * (d_k_later - d_k_predicted)).sum(-1)
        + (strictly @ scaled * d_updates).sum(-1)
        - (scaled * d_scaled_before).sum(-1)
    )
    # A gate also scales what the state and the tokens before it contribute to the next state.
    to_end = pad((c.k * d_k_state).sum(-1), (1, -1)).cumsum(-1)
    to_end += (c.total_decay * c.state * d_state).sum((-2, -1)).unsqueeze(-1)
    d_g = torch.where(c.gated, d_sums.flip(-1).cumsum(-1).flip(-1) + to_end, 0)
    before = c.total_decay * d_state + c.q.mT @ (c.left * d_out) + c.k.mT @ d_predicted
    return Terms(d_q, d_k, d_residual, d_g, d_beta), before
