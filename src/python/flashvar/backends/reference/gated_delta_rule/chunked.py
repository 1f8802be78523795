"""The same in chunks of tokens, by matrix products: the plan of the chunked kernels.

For a chunk with the inclusive sums G of its gates, L = exp(G), R = exp(G[-1] - G) and
D[i, j] = exp(G[i] - G[j]) for j <= i, else 0:

    A = strictly_lower(beta K K^T);  T = inverse(I + A), which has no gate in it
    W = V - L (K S);  N = (T D) (beta W);  P = (Q K^T) D
    out = L (Q S) + P N;  S_next = exp(G[-1]) S + K^T (R N)

N are the updates u of the recurrence. T comes of forward substitution: doubling (I - A)(I + A^2)...
loses all digits for equal keys with beta near 2. exp(-G) is never formed, which overflows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch.nn.functional import pad

from flashvar.backends.reference.gated_delta_rule.activations import Terms

CHUNK: Final = 64
# exp of it is 0 in float32 (and below any float64 result): sums of gates stay finite.
_LOWEST_GATE: Final = {torch.float32: -104.0, torch.float64: -746.0}


class _Chunk(NamedTuple):
    """A chunk's matrices; the last three depend on the state before it."""

    gated: torch.Tensor  # [..., C]: whether the gate leaves anything
    q: torch.Tensor
    k: torch.Tensor
    beta: torch.Tensor  # [..., C, 1]
    left: torch.Tensor  # L [..., C, 1]
    right: torch.Tensor  # R [..., C, 1]
    whole: torch.Tensor  # exp(G[-1]) [..., 1, 1]
    decay: torch.Tensor  # D [..., C, C]
    inverse: torch.Tensor  # T [..., C, C]
    scores: torch.Tensor  # P [..., C, C]
    state: torch.Tensor  # S [..., K, V]
    rest: torch.Tensor  # W [..., C, V]
    written: torch.Tensor  # N [..., C, V]


def forward(terms: Terms, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [batch, heads, seqlen, V], and the state [batch, heads, K, V] after the last token."""
    outs = [terms.v[:, :, :0]]
    for chunk_terms in _chunks(terms):
        c = _chunk(chunk_terms, state)
        outs.append(c.left * (c.q @ state) + c.scores @ c.written)
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
    """The last is filled with tokens that change nothing: k, v, g and beta of 0."""
    more = -terms.q.shape[2] % CHUNK
    padded = Terms(*(pad(x, (0, 0, 0, more) if x.dim() == 4 else (0, more)) for x in terms))
    return [padded.rows(t, t + CHUNK) for t in range(0, padded.q.shape[2], CHUNK)]


def _chunk(terms: Terms, state: torch.Tensor) -> _Chunk:
    q, k, v, g, beta = terms
    # Sums in float64: differences of large ones would have few digits left.
    sums = g.clamp(min=_LOWEST_GATE[g.dtype]).double().cumsum(-1)
    between = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    decay = between.tril().to(g.dtype).exp().tril()
    to_end = (sums[..., -1:] - sums).to(g.dtype)
    beta = beta.unsqueeze(-1)
    one = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    system = one + (beta * (k @ k.mT)).tril(-1)
    inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    left, right = sums.to(g.dtype).exp().unsqueeze(-1), to_end.exp().unsqueeze(-1)
    rest = v - left * (k @ state)
    written = (inverse * decay) @ (beta * rest)
    whole, scores = left[..., -1:, :], (q @ k.mT) * decay
    gated = g > _LOWEST_GATE[g.dtype]
    constants = (gated, q, k, beta, left, right, whole, decay, inverse, scores)
    return _Chunk(*constants, state, rest, written)


def _next(c: _Chunk) -> torch.Tensor:
    return c.whole * c.state + c.k.mT @ (c.right * c.written)


def _chunk_backward(
    c: _Chunk, d_out: torch.Tensor, d_state: torch.Tensor
) -> tuple[Terms, torch.Tensor]:
    """The gradients of a chunk's terms, and of the state before it.

    The gradient of G has no sum over [C, C]: the sums of dP P and dT T over rows and columns are
    products of rows that are there anyway. What a token has to do with itself is left out of both
    sums: no gate is between, and where gates are strong their difference would be rounding alone.
    """
    strictly = (c.inverse * c.decay).tril(-1)
    scaled = c.beta * c.rest
    d_written = c.scores.mT @ d_out + c.right * (c.k @ d_state)
    d_scaled_before = strictly.mT @ d_written
    d_scaled = d_scaled_before + d_written
    d_rest = c.beta * d_scaled
    d_read = -c.left * d_rest
    d_product = (d_out @ c.written.mT).tril() * c.decay
    itself = d_product.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    d_before = d_product.tril(-1)
    d_q_before, d_q_state = d_before @ c.k, c.left * (d_out @ c.state.mT)
    d_inverse = (d_written @ scaled.mT).tril() * c.decay
    d_system = -(c.inverse.mT @ d_inverse @ c.inverse.mT).tril(-1)
    d_gram = c.beta * d_system
    d_k_later = d_before.mT @ c.q
    d_k_state = c.right * (c.written @ d_state.mT)
    d_k_read = d_read @ c.state.mT
    d_q = d_q_before + itself * c.k + d_q_state
    d_k = d_k_later + itself * c.q + d_k_state + d_k_read + d_gram @ c.k + d_gram.mT @ c.k
    d_beta = (c.rest * d_scaled).sum(-1) + (d_system * (c.k @ c.k.mT)).sum(-1)
    d_sums = (
        (c.q * (d_q_before + d_q_state)).sum(-1)
        - (c.k * (d_k_later - d_k_read)).sum(-1)
        + (strictly @ scaled * d_written).sum(-1)
        - (scaled * d_scaled_before).sum(-1)
    )
    # A gate scales what the tokens before it, and the state, leave in the state after the chunk.
    to_end = pad((c.k * d_k_state).sum(-1), (1, -1)).cumsum(-1)
    to_end += (c.whole * c.state * d_state).sum((-2, -1)).unsqueeze(-1)
    d_g = torch.where(c.gated, d_sums.flip(-1).cumsum(-1).flip(-1) + to_end, 0)
    before = c.whole * d_state + c.q.mT @ (c.left * d_out) + c.k.mT @ d_read
    return Terms(d_q, d_k, d_rest, d_g, d_beta), before
