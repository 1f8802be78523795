"""The backward of the reference: gradients from probabilities recomputed with the log-sum-exp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashvar.backends.reference.attention.scores import (
    bias_of,
    compute_dtype,
    dropout_factors,
    folded,
    row_chunks,
    scores,
    times,
    without_autocast,
)
from flashvar.backends.reference.attention.sequences import (
    Part,
    of_keys,
    of_lse,
    of_outputs,
    of_queries,
    parts,
)

if TYPE_CHECKING:
    from flashvar.ops.attention.problem import Gradients, Inputs, Problem


@without_autocast
def attention_bwd(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grads: Gradients,
    delta: torch.Tensor | None = None,
) -> None:
    """Write the gradients of q, k and v, and delta; add to the gradient of the bias.

    With P the probabilities and dP = dO V^T, the gradient of the scores is P * (dP - delta).
    delta is the sum of P * dP over the keys, which equals the sum of dO * O over the head dim.
    """
    for grad in grads[:3]:
        assert grad is not None
        grad.zero_()
    for part in parts(problem, inputs):
        if delta is not None:
            _write_delta(problem, out, grad_out, grad_lse, delta, part)
        if part.seqlen_k > 0 and part.seqlen_q > 0:
            _part(problem, inputs, out, lse, grad_out, grad_lse, grads, part)


def _write_delta(
    problem: Problem,
    out: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    delta: torch.Tensor,
    part: Part,
) -> None:
    outs, grad_outs = of_outputs(problem, out, part), of_outputs(problem, grad_out, part)
    target = of_lse(problem, delta, part)
    for rows in row_chunks(problem, part):
        found = grad_outs[..., rows, :].to(delta.dtype) * outs[..., rows, :].to(delta.dtype)
        target[..., rows] = found.sum(-1)
    if grad_lse is not None:
        target -= of_lse(problem, grad_lse, part)


def _part(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    grads: Gradients,
    part: Part,
) -> None:
    dtype = compute_dtype(problem)
    queries, outs = of_queries(problem, inputs.q, part), of_outputs(problem, out, part)
    grad_outs = of_outputs(problem, grad_out, part)
    grad_queries = of_queries(problem, grads.q, part)
    keys = of_keys(problem, inputs.k, part).to(dtype)
    values = of_keys(problem, inputs.v, part).to(dtype)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    sums = of_lse(problem, lse, part)
    grad_sums = None if grad_lse is None else of_lse(problem, grad_lse, part)
    for rows in row_chunks(problem, part):
        chunk = queries[..., rows, :].to(dtype)
        grad_chunk = grad_outs[..., rows, :].to(dtype)
        found = scores(problem, inputs, part, rows, chunk, keys)
        row_lse = sums[..., rows, None].to(dtype)
        probabilities = torch.exp(found.final - row_lse.masked_fill(row_lse == -torch.inf, 0.0))
        delta = (grad_chunk * outs[..., rows, :].to(dtype)).sum(-1, keepdim=True)
        if grad_sums is not None:
            delta = delta - grad_sums[..., rows, None].to(dtype)
        grad_probabilities = times(grad_chunk, values.mT)
        kept = dropout_factors(problem, inputs, part, rows, dtype)
        if kept is not None:
            grad_probabilities = grad_probabilities * kept
        grad_scores = probabilities * (grad_probabilities - delta)
        # A row that sees no key has lse -inf; the incoming gradient of that lse may be any number.
        grad_scores = grad_scores.masked_fill(probabilities == 0.0, 0.0)
        dropped = probabilities if kept is None else probabilities * kept
        grad_values += folded(dropped).mT @ folded(grad_chunk)
        if grads.bias is not None:
            target = bias_of(problem, grads.bias, part, rows)
            target += grad_scores.sum_to_size(target.shape)
        if problem.softcap > 0:
            grad_scores = grad_scores * (1 - (found.capped / problem.softcap).square())
        grad_scores = grad_scores * problem.scale
        grad_queries[..., rows, :] = times(grad_scores, keys).to(grads.q.dtype)
        grad_keys += folded(grad_scores).mT @ folded(chunk)
    of_keys(problem, grads.k, part).copy_(grad_keys)
    of_keys(problem, grads.v, part).copy_(grad_values)
