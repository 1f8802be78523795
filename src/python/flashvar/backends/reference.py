"""Attention in plain torch operations: right everywhere, fast nowhere.

Serves CPU tensors, any device when it is named, and the gradients. Float32 throughout, float64 for
float64 inputs. Scores exist for one chunk of query rows at a time, so memory stays linear in the
length of k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from flashvar.backends import Launch
    from flashvar.ops.attention_inputs import Problem
    from flashvar.verdicts import Verdict

# Scores that are held at once: 64 MiB of float32.
_SCORES_AT_ONCE: Final = 1 << 24


def prepare_attention_fwd(problem: Problem, verdict: Verdict) -> Launch:
    """Bind the problem; nothing is there to choose."""
    del verdict

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        attention_fwd(problem, q, k, v, out, lse)

    return launch


def attention_fwd(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write softmax(scale * q k^T + mask) v and its log-sum-exp; see `flashvar.attention`."""
    grouped_out = _grouped(problem, out)
    keys = _keys(problem, k)
    values = _keys(problem, v)
    queries = _grouped(problem, q)
    for rows in _row_chunks(problem):
        scores = _scores(problem, queries[..., rows, :].to(keys.dtype), keys, rows)
        row_max = scores.amax(-1, keepdim=True)
        # A row that sees no key has maximum -inf; 0 instead keeps the difference from being NaN.
        weights = torch.exp(scores - row_max.masked_fill(row_max == -torch.inf, 0.0))
        row_sum = weights.sum(-1, keepdim=True)
        sums = _times(weights, values)
        grouped_out[..., rows, :] = sums / row_sum.masked_fill(row_sum == 0.0, 1.0)
        if lse is not None:
            of_group = lse.unflatten(1, (problem.heads_kv, -1))
            of_group[..., rows] = (row_max + row_sum.log()).squeeze(-1)


def attention_bwd(
    problem: Problem,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, each contiguous in the user's layout.

    Recomputes the softmax chunk by chunk: with P its weights, dP = dO V^T and D = rowsum(P o dP),
    dS = P o (dP - D + dLSE), dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO (FlashAttention-2,
    Dao 2023, section 3.2; the term dLSE is the derivative of log-sum-exp).
    """
    grad_q, grad_k, grad_v = (
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)
    )
    if problem.empty:
        return grad_q, grad_k, grad_v
    keys, values = _keys(problem, k), _keys(problem, v)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    queries, grad_queries = _grouped(problem, q), _grouped(problem, grad_q)
    grad_outs = None if grad_out is None else _grouped(problem, grad_out)
    grad_lses = None if grad_lse is None else grad_lse.unflatten(1, (problem.heads_kv, -1))
    for rows in _row_chunks(problem):
        chunk = queries[..., rows, :].to(keys.dtype)
        scores = _scores(problem, chunk, keys, rows)
        row_max = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - row_max.masked_fill(row_max == -torch.inf, 0.0))
        row_sum = weights.sum(-1, keepdim=True)
        weights = weights / row_sum.masked_fill(row_sum == 0.0, 1.0)
        grad_scores = torch.zeros_like(weights)
        if grad_outs is not None:
            grad_chunk = grad_outs[..., rows, :].to(keys.dtype)
            grad_values += _folded(weights).mT @ _folded(grad_chunk)
            grad_weights = _times(grad_chunk, values.mT)
            delta = (weights * grad_weights).sum(-1, keepdim=True)
            grad_scores = weights * (grad_weights - delta)
        if grad_lses is not None:
            grad_scores = grad_scores + weights * grad_lses[..., rows, None].to(keys.dtype)
        grad_scores = grad_scores * problem.scale
        grad_queries[..., rows, :] = _times(grad_scores, keys).to(grad_q.dtype)
        grad_keys += _folded(grad_scores).mT @ _folded(chunk)
    problem.bshd(grad_k).copy_(grad_keys.transpose(1, 2))
    problem.bshd(grad_v).copy_(grad_values.transpose(1, 2))
    return grad_q, grad_k, grad_v


def _grouped(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """View [batch, heads_kv, group, seqlen_q, head_dim]: the heads that share keys are together."""
    heads_first = problem.bshd(tensor).transpose(1, 2)
    return heads_first.unflatten(1, (problem.heads_kv, problem.heads_q // problem.heads_kv))


def _keys(problem: Problem, tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads_kv, seqlen_k, head_dim] in the dtype that is computed in."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return problem.bshd(tensor).transpose(1, 2).to(dtype)


def _row_chunks(problem: Problem) -> Iterator[slice]:
    per_row = max(1, problem.batch * problem.heads_q * problem.seqlen_k)
    step = max(1, _SCORES_AT_ONCE // per_row)
    for start in range(0, problem.seqlen_q, step):
        yield slice(start, min(start + step, problem.seqlen_q))


def _folded(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads_kv, group * rows, n]: one product for all heads that share keys."""
    return tensor.flatten(2, 3)


def _times(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[batch, heads_kv, group, rows, n] times [batch, heads_kv, n, m], keys not repeated."""
    return (_folded(left) @ right).unflatten(2, left.shape[2:4])


def _scores(problem: Problem, chunk: torch.Tensor, keys: torch.Tensor, rows: slice) -> torch.Tensor:
    """Scaled scores [batch, heads_kv, group, rows, seqlen_k], -inf where a key is hidden."""
    scores = _times(chunk, keys.mT) * problem.scale
    if problem.causal:
        query = torch.arange(rows.start, rows.stop, device=chunk.device)
        key = torch.arange(problem.seqlen_k, device=chunk.device)
        last_visible = query + (problem.seqlen_k - problem.seqlen_q)
        scores = scores.masked_fill(key > last_visible[:, None], -torch.inf)
    return scores
