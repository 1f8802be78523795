"""The forward of the reference, one chunk of query rows at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from flashvar.backends.reference.attention.scores import (
    compute_dtype,
    dropout_factors,
    row_chunks,
    scores,
    sinks_of,
    times,
    without_autocast,
)
from flashvar.backends.reference.attention.sequences import (
    of_keys,
    of_lse,
    of_outputs,
    of_queries,
    parts,
)

if TYPE_CHECKING:
    from flashvar.ops.attention.problem import Inputs, Problem

# Lower bound of the maximum that exponents are relative to. Lower scores come from masks of large
# finite numbers. A row that has no others counts as a row without a visible key: its log-sum-exp is
# too large for the number of its keys to change it.
MIN_RUNNING_MAX: Final = -(2.0**24) * math.log(2.0)


@without_autocast
def attention_fwd(
    problem: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Write the output and its log-sum-exp; see `flashvar.attention`."""
    out.zero_()
    if lse is not None:
        lse.fill_(-torch.inf)
    dtype = compute_dtype(problem)
    for part in parts(problem, inputs):
        sinks = sinks_of(problem, inputs.sinks)
        if part.seqlen_k == 0:
            if sinks is not None and lse is not None:
                of_lse(problem, lse, part).copy_(sinks[..., 0])
            continue
        queries, outs = of_queries(problem, inputs.q, part), of_outputs(problem, out, part)
        keys = of_keys(problem, inputs.k, part).to(dtype)
        values = of_keys(problem, inputs.v, part).to(dtype)
        for rows in row_chunks(problem, part):
            found = scores(problem, inputs, part, rows, queries[..., rows, :].to(dtype), keys).final
            row_max = found.amax(-1, keepdim=True)
            if sinks is not None:
                row_max = torch.maximum(row_max, sinks)
            # Finite in rows that see no key, whose maximum is -inf: -inf - -inf is NaN.
            shift = row_max.clamp(min=MIN_RUNNING_MAX)
            unnormalized = torch.exp(found - shift)
            row_sum = unnormalized.sum(-1, keepdim=True)
            if sinks is not None:
                row_sum = row_sum + torch.exp(sinks - shift)
            kept = dropout_factors(problem, inputs, part, rows, dtype)
            if kept is not None:
                unnormalized = unnormalized * kept
            sums = times(unnormalized, values) / row_sum.masked_fill(row_sum == 0.0, 1.0)
            outs[..., rows, :] = sums.to(out.dtype)
            if lse is not None:
                of_lse(problem, lse, part)[..., rows] = (shift + row_sum.log())[..., 0]
