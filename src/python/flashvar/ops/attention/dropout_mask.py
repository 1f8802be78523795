"""The signed probabilities of a call, as FlashAttention 2 shows them to its tests (S_dmask).

An entry is negative where dropout removed the weight. Its magnitude is exp(s - m), where s is the
score and m the running maximum of its query in the kernel of FlashAttention 2, which visits the
blocks of keys from the last to the first. Entries that a mask hides are 0. The whole matrix of
scores is in memory: this is for tests.
"""

from __future__ import annotations

from typing import Final

import torch

from flashvar.backends.reference.attention.scores import (
    compute_dtype,
    dropout_factors,
    scores,
)
from flashvar.backends.reference.attention.sequences import of_keys, of_queries, parts
from flashvar.ops.attention.problem import Inputs, Options
from flashvar.ops.attention.validate import inspect

_ROUNDED_TO: Final = 128
# Largest head dim -> keys in a block of FlashAttention 2 with dropout.
_BLOCKS: Final = {32: 128, 64: 64, 96: 64, 128: 32, 160: 32, 256: 64}
_SMALL_SHARED_MEMORY: Final = {160: 64}  # capabilities 8.6 and 8.9


def signed_probabilities(inputs: Inputs, options: Options) -> torch.Tensor:
    """[batch, heads_q, seqlen_q, seqlen_k] in the dtype of q, lengths rounded up to 128."""
    device = "cuda" if inputs.q.is_cuda else "cpu"
    # Not `without_autocast`, which torch.compile does not trace.
    with torch.no_grad(), torch.autocast(device, enabled=False):
        return _signed_probabilities(inputs, options)


def _signed_probabilities(inputs: Inputs, options: Options) -> torch.Tensor:
    problem = inspect(inputs, options._replace(backend="reference"))
    dtype = compute_dtype(problem)
    block = block_of_keys(problem.head_dim, inputs.q.device)
    longest = (options.max_seqlen_q or problem.seqlen_q, options.max_seqlen_k or problem.seqlen_k)
    lengths = (-(-n // _ROUNDED_TO) * _ROUNDED_TO for n in longest)
    shown = inputs.q.new_zeros((problem.batch, problem.heads_q, *lengths))
    for part in parts(problem, inputs):
        if part.seqlen_q == 0 or part.seqlen_k == 0:
            continue
        rows = slice(0, part.seqlen_q)
        queries = of_queries(problem, inputs.q, part).to(dtype)
        keys = of_keys(problem, inputs.k, part).to(dtype)
        found = scores(problem, inputs, part, rows, queries, keys).final
        probabilities = torch.exp(found - _seen_maximum(found, block))
        factors = dropout_factors(problem, inputs, part, rows, dtype)
        if factors is not None:
            # Kept ones have the factor 1 / (1 - p), the others 0.
            probabilities = torch.where(factors > 0, probabilities, -probabilities)
        target = shown[part.batch, :, rows, : part.seqlen_k]
        target.copy_(probabilities.flatten(1, 2))
    return shown


def _seen_maximum(found: torch.Tensor, block: int) -> torch.Tensor:
    """The largest score of an entry's own block of keys and all later ones; 0 instead of -inf."""
    later = found.flip(-1).cummax(-1).values.flip(-1)
    later = later.masked_fill(later == -torch.inf, 0.0)
    # Not through parts of a split: their number would be a constant of a traced graph.
    key = torch.arange(found.shape[-1], device=found.device)
    return later.index_select(-1, key // block * block)


def block_of_keys(head_dim: int, device: torch.device) -> int:
    """How many keys share a running maximum in `signed_probabilities`."""
    bound = next((bound for bound in _BLOCKS if head_dim <= bound), max(_BLOCKS))
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major == 8 and minor > 0:
            return _SMALL_SHARED_MEMORY.get(bound, _BLOCKS[bound])
    return _BLOCKS[bound]
