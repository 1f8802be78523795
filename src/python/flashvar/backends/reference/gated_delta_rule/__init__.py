"""gated_delta_rule in plain torch operations: float32 throughout, float64 for float64 inputs.

Short sequences go token by token, longer ones in chunks. Lengths of packed sequences are read on
the host, which waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import torch

from flashvar.backends.reference.gated_delta_rule import activations, chunked, recurrence
from flashvar.backends.reference.gated_delta_rule.activations import Terms
from flashvar.ops.gated_delta_rule.problem import Gradients, Inputs

# Sequences of fewer tokens take less time token by token.
_RECURRENT_BELOW: Final = 8


def forward(
    inputs: Inputs,
    initial_state: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor,
) -> None:
    """Write out, and the state after each sequence."""
    terms = activations.forward(inputs)
    for part, rows, states in _sequences(inputs, terms):
        state = _first(inputs, initial_state, states)
        with _no_autocast(inputs):
            found, after = _algorithm(part).forward(part, state)
        out[rows].copy_(found.transpose(1, 2))
        final_state[states].copy_(after)


def update(inputs: Inputs, pool: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """As forward, on states pool[indices] in place; an index outside: zeros, not written."""
    wide = activations.wide_dtype(inputs)
    # Not clamped: a pool may have no states at all.
    inside = (indices >= 0) & (indices < pool.shape[0])
    slots = indices[inside]
    before = pool.new_zeros(indices.shape[0], *pool.shape[1:], dtype=wide)
    before[inside] = pool[slots].to(wide)
    after = torch.empty_like(before)
    forward(inputs, before, out, after)
    pool[slots] = after[inside].to(pool.dtype)


def backward(
    inputs: Inputs,
    initial_state: torch.Tensor | None,
    grad_out: torch.Tensor | None,
    grad_final_state: torch.Tensor | None,
) -> Gradients:
    """The gradients of all inputs; an absent gradient of a result counts as zeros."""
    terms = activations.forward(inputs)
    grads = Terms(*(torch.zeros_like(x) for x in terms))
    k, v = inputs.q.shape[-1], inputs.v.shape[-1]
    of_state = terms.q.new_zeros(inputs.sequences, inputs.heads, k, v)
    for part, rows, states in _sequences(inputs, terms):
        state = _first(inputs, initial_state, states)
        d_out = torch.zeros_like(part.v)
        if grad_out is not None:
            d_out.copy_(grad_out[rows].transpose(1, 2))
        d_final = torch.zeros_like(state)
        if grad_final_state is not None:
            d_final.copy_(grad_final_state[states])
        with _no_autocast(inputs):
            found, d_state = _algorithm(part).backward(part, state, d_out, d_final)
        for whole, one in zip(grads, found, strict=True):
            whole.transpose(1, 2)[rows].copy_(one.transpose(1, 2))
        of_state[states] = d_state
    return activations.backward(inputs, grads, None if initial_state is None else of_state)


Rows = tuple[slice, slice]


def _sequences(inputs: Inputs, terms: Terms) -> Iterator[tuple[Terms, Rows, slice]]:
    """Terms of sequences of one length, their rows, and their states."""
    if inputs.cu_seqlens is None:
        yield terms, (slice(None), slice(None)), slice(None)
        return
    offsets = inputs.cu_seqlens.tolist()
    for i, (begin, end) in enumerate(pairwise(offsets)):
        yield terms.rows(begin, end), (slice(None), slice(begin, end)), slice(i, i + 1)


def _no_autocast(inputs: Inputs) -> Any:
    """Disables autocast, which would change the dtype of matrix products within the op."""
    return torch.autocast(inputs.q.device.type, enabled=False)


def _algorithm(terms: Terms) -> ModuleType:
    return recurrence if terms.q.shape[2] < _RECURRENT_BELOW else chunked


def _first(inputs: Inputs, initial_state: torch.Tensor | None, states: slice) -> torch.Tensor:
    """The states before some sequences."""
    wide = activations.wide_dtype(inputs)
    if initial_state is not None:
        return initial_state[states].to(wide)
    count = len(range(inputs.sequences)[states])
    sizes = (count, inputs.heads, inputs.q.shape[-1], inputs.v.shape[-1])
    return torch.zeros(sizes, dtype=wide, device=inputs.q.device)
