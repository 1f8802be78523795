"""The shared part of FlashAttention 2's functions: its argument rules, on top of `call`."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.ops.arguments import (
    as_bool,
    as_integer,
    check_strided,
    is_number,
    refuses_unknown_subclasses,
)
from flashvar.ops.attention.cache import read
from flashvar.ops.attention.call import call, rng_state_of
from flashvar.ops.attention.dropout_mask import signed_probabilities
from flashvar.ops.attention.options import plain_number, window_pair, window_side
from flashvar.ops.attention.paged import packed_in_place
from flashvar.ops.attention.problem import (
    NO_TENSORS,
    Inputs,
    OptionalTensors,
    Options,
    pack_options,
    pack_tensors,
)
from flashvar.ops.attention.validate import rows_contiguous
from flashvar.ops.autocast import as_autocast
from flashvar.ops.unknown_sizes import is_known

Window = tuple[int, int]
Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SharedArguments(NamedTuple):
    """The arguments that all functions share, in their order."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: torch.Tensor | None
    deterministic: bool
    return_attn_probs: bool


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: SharedArguments) -> Result:
    """Attention of dense tensors."""
    _check(arguments)
    if isinstance(q, torch.Tensor) and q.dim() == 4 and is_known(q.size(0) == 0):
        raise ShapeError(
            f"the batch must hold at least 1 sequence, found q of shape {tuple(q.shape)}: skip the "
            "call, or use flashvar.attention, which takes empty batches"
        )
    rng_state = rng_state_of(q, arguments.dropout_p)
    tensors = NO_TENSORS
    if rng_state is not None or arguments.alibi_slopes is not None:
        tensors = pack_tensors(None, None, arguments.alibi_slopes, rng_state)
    return _attend(q, k, v, tensors, arguments, (None, None))


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    arguments: SharedArguments,
    block_table: torch.Tensor | None = None,
) -> Result:
    """Attention of packed sequences; with a block_table keys and values are pages."""
    _check(arguments)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None:
            raise InvalidInputError(
                f"packed sequences need {name}, found None: pass int32 offsets (batch + 1,), or "
                "call the function without varlen for dense tensors"
            )
    no_sequences = isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1
    if no_sequences and is_known(cu_seqlens_q.shape[0] == 1):
        raise ShapeError(
            "the batch must hold at least 1 sequence, found cu_seqlens_q of shape (1,): skip the "
            "call, or use flashvar.attention_varlen, which takes empty batches"
        )
    bounds = (as_integer(max_seqlen_q), as_integer(max_seqlen_k))
    lengths = None
    if block_table is not None:
        if not arguments.dropout_p:
            options = _options(arguments, bounds)
            pages = (k, v, cu_seqlens_q, cu_seqlens_k, block_table)
            found = packed_in_place(rows_contiguous(q), *pages, arguments.alibi_slopes, options)
            if found is not None:
                return (*found, q.new_empty(0)) if _wants_lse(arguments) else found[0]
        k, v, lengths = read(k, v, cu_seqlens_k, bounds[1], block_table=block_table)
    rng_state = rng_state_of(q, arguments.dropout_p)
    tensors = pack_tensors(
        *(None, None, arguments.alibi_slopes, rng_state, cu_seqlens_q),
        *(cu_seqlens_k if lengths is None else None, lengths),
    )
    return _attend(q, k, v, tensors, arguments, bounds)


@refuses_unknown_subclasses
def unpacked(name: str, packed: torch.Tensor, rank: int, count: int) -> tuple[torch.Tensor, ...]:
    """Views of the tensors that are stacked in the third to last dimension."""
    check_strided(name, packed)
    if packed.dim() != rank or packed.shape[-3] != count:
        lead = "batch, seqlen" if rank == 5 else "total"
        raise ShapeError(
            f"{name} must have shape ({lead}, {count}, heads, head_dim), found "
            f"{tuple(packed.shape)}: stack the tensors with torch.stack(..., dim=-3)"
        )
    # Once, and before they are views: in the backward of unbind, autocast of another 16-bit dtype
    # would refuse to stack their gradients on the CPU.
    return tuple(as_autocast(packed).unbind(-3))


def _check(arguments: SharedArguments) -> None:
    numbers = is_number(arguments.softcap) and is_number(arguments.dropout_p)
    if numbers and arguments.softcap and arguments.dropout_p:
        raise InvalidInputError(
            f"softcap cannot be combined with dropout, found softcap={arguments.softcap} and "
            f"dropout_p={arguments.dropout_p}: leave one out, or use flashvar.attention, which "
            "takes both"
        )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: OptionalTensors,
    arguments: SharedArguments,
    bounds: tuple[int | None, int | None],
) -> Result:
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    options = _options(arguments, bounds)
    with_lse = _wants_lse(arguments)
    out, lse = call(q, k, v, tensors, options, with_lse)
    if not with_lse or lse is None:
        return out
    if arguments.dropout_p == 0:
        return out, lse, out.new_empty(0)
    inputs = Inputs(*map(as_autocast, (q, k, v)), *tensors)
    probabilities = signed_probabilities(inputs, Options._make(options))
    return out, lse, probabilities


def _wants_lse(arguments: SharedArguments) -> bool:
    return as_bool("return_attn_probs", arguments.return_attn_probs)


def _options(arguments: SharedArguments, bounds: tuple[int | None, int | None]) -> tuple[Any, ...]:
    """The fields of Options, in order."""
    left, right = window_pair(arguments.window_size)
    return pack_options(
        as_bool("causal", arguments.causal),
        plain_number(arguments.softmax_scale),
        window_side(left, arguments.window_size),
        window_side(right, arguments.window_size),
        arguments.softcap,
        arguments.dropout_p,
        as_bool("deterministic", arguments.deterministic),
        "bshd",
        "auto",
        *bounds,
    )
