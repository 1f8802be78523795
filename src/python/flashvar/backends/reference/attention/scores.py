"""The scores of a chunk of query rows against all keys of their sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Final, NamedTuple, ParamSpec, TypeVar

import torch

from flashvar.backends.reference.attention.dropout import keeps, kept_scale

if TYPE_CHECKING:
    from flashvar.backends.reference.attention.sequences import Part
    from flashvar.ops.attention.problem import Inputs, Problem

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# How many scores are held at once: 64 MiB in float32.
_SCORES_AT_ONCE: Final = 1 << 24


class Scores(NamedTuple):
    """[batch, heads_kv, group, rows, seqlen_k] each."""

    final: torch.Tensor  # with bias and mask; -inf where a key is hidden
    capped: torch.Tensor  # with scale and softcap only


def row_chunks(problem: Problem, part: Part) -> Iterator[slice]:
    """Ranges of the query rows of a part, small enough for _SCORES_AT_ONCE."""
    sequences = part.batch.stop - part.batch.start
    per_row = max(1, sequences * problem.heads_q * part.seqlen_k)
    step = max(1, _SCORES_AT_ONCE // per_row)
    for start in range(0, part.seqlen_q, step):
        yield slice(start, min(start + step, part.seqlen_q))


def compute_dtype(problem: Problem) -> torch.dtype:
    """The dtype of the computation."""
    return problem.lse_dtype


def without_autocast(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator: disables autocast, which has already cast the inputs."""

    @wraps(function)
    def wrapped(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with torch._C._DisableAutocast():
            return function(*arguments, **options)

    return wrapped


def folded(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads_kv, group * rows, n], so that heads that share keys need one product."""
    return tensor.flatten(2, 3)


def times(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[batch, heads_kv, group, rows, n] times [batch, heads_kv, n, m], without repeating keys."""
    return (folded(left) @ right).unflatten(2, left.shape[2:4])


def scores(
    problem: Problem,
    inputs: Inputs,
    part: Part,
    rows: slice,
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> Scores:
    """The scores of `queries`, the rows `rows` of the part, against `keys`."""
    capped = times(queries, keys.mT) * problem.scale
    if problem.softcap > 0:
        capped = problem.softcap * torch.tanh(capped / problem.softcap)
    final = capped
    if inputs.bias is not None:
        final = final + bias_of(problem, inputs.bias, part, rows).to(final.dtype)
    diagonal, key = _diagonal_and_keys(part, rows, queries.device)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.expand(problem.batch, -1)[part.batch]
        slopes = slopes.unflatten(1, (problem.heads_kv, -1)).to(final.dtype)
        final = final - slopes[..., None, None] * (diagonal - key).abs()
    if problem.window_left >= 0:
        final = final.masked_fill(key < diagonal - problem.window_left, -torch.inf)
    if problem.window_right >= 0:
        final = final.masked_fill(key > diagonal + problem.window_right, -torch.inf)
    return Scores(final, capped)


def sinks_of(problem: Problem, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Sinks [heads_kv, group, 1, 1] in the dtype of the computation."""
    if sinks is None:
        return None
    return sinks.to(compute_dtype(problem)).view(problem.heads_kv, -1, 1, 1)


def bias_of(problem: Problem, bias: torch.Tensor, part: Part, rows: slice) -> torch.Tensor:
    """View of a bias or its gradient, [batch or 1, heads_kv or 1, group or 1, rows, seqlen_k]."""
    if bias.shape[0] > 1:
        bias = bias[part.batch]
    bias = bias[:, :, rows, part.keys]
    if bias.shape[1] == 1:
        return bias[:, :, None]
    return bias.unflatten(1, (problem.heads_kv, -1))


def dropout_factors(
    problem: Problem, inputs: Inputs, part: Part, rows: slice, dtype: torch.dtype
) -> torch.Tensor | None:
    """The factors of P, [batch, heads_kv, group, rows, seqlen_k]; None without dropout."""
    rng_state = inputs.rng_state
    if problem.dropout_p == 0 or rng_state is None:
        return None
    device = rng_state.device
    batch = torch.arange(part.batch.start, part.batch.stop, device=device)
    head = torch.arange(problem.heads_q, device=device)
    head_indices = (batch[:, None] * problem.heads_q + head).unflatten(1, (problem.heads_kv, -1))
    row = torch.arange(rows.start, rows.stop, device=device)
    column = torch.arange(part.seqlen_k, device=device)
    kept = keeps(rng_state, head_indices, row, column, problem.dropout_p)
    return kept.to(dtype) * kept_scale(problem.dropout_p)


def _diagonal_and_keys(
    part: Part, rows: slice, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The diagonal keys of the rows, [rows, 1], and the keys, [seqlen_k]."""
    query = torch.arange(rows.start, rows.stop, device=device)
    key = torch.arange(part.seqlen_k, device=device)
    return (query + (part.seqlen_k - part.seqlen_q))[:, None], key
