"""Attention of a layer inside torch's context_parallel, where tensors are parts of sequences."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional

from flashvar.errors import BackendUnavailableError
from flashvar.integrations.fallback import report_fallback
from flashvar.integrations.torch import flash as torch_flash
from flashvar.integrations.torch.attribute import REPLACED
from flashvar.integrations.transformers.fallback import ONLY_EAGER, ONLY_ITS_OWN, Call
from flashvar.integrations.transformers.rows import Rows, rows_of_jumps
from flashvar.integrations.transformers.visibility import Visibility

__all__ = ["distributed_attention"]

# The attribute of positions that keeps the answer for all layers: comparing waits for the device.
_ONE_SEQUENCE: Final = "_flashvar_one_sequence"
_NOT_TORCHS: Final = (*ONLY_EAGER, *ONLY_ITS_OWN, "position_bias", "cache")


def distributed_attention(
    module: torch.nn.Module, call: Call, visibility: Visibility, others: dict[str, Any]
) -> torch.Tensor:
    """Attention over the whole sequences, [batch, seqlen_q, heads_q, head_dim_v].

    Calls torch's function, which context_parallel has replaced. Flashvar runs its steps if
    flashvar is torch's flash attention.

    Raises:
        BackendUnavailableError: context_parallel does not support the call; or FLASHVAR_STRICT=1,
            and flashvar ran none of its steps.
    """
    name = type(module).__name__
    found = _beyond_torchs(call, visibility, others)
    if found is not None:
        raise BackendUnavailableError(
            f"{name}: expected attention that torch's context_parallel supports, causal or full, "
            f"found {found}: run the model outside of it"
        )
    query, key, value = call.query, call.key, call.value
    before = torch_flash.CALLS.of_this_thread()
    out: torch.Tensor = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=call.dropout,
        is_causal=visibility.causal,
        scale=call.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    steps = torch_flash.CALLS.of_this_thread() - before
    if not torch.compiler.is_compiling() and not steps:
        report_fallback(name, REPLACED, "that one")
    return out.transpose(1, 2)


def _beyond_torchs(call: Call, visibility: Visibility, others: dict[str, Any]) -> str | None:
    """The feature of a call that context_parallel does not support, in words; None without one."""
    given = {**others, **call._asdict()}
    for name in _NOT_TORCHS:
        if given.get(name) is not None and given[name] is not False:
            return name
    positions = others.get("position_ids")
    if visibility.rows is not None and not _is_one_sequence(
        visibility, positions, call.query.shape[0]
    ):
        return "padding or packed sequences"
    if visibility.bias is not None:
        return "a mask"
    if visibility.window != (-1, -1):
        return "a sliding window"
    queries, keys = call.query.shape[2], call.key.shape[2]
    if visibility.keys != keys or (visibility.causal and queries != keys):
        return f"{queries} queries with {keys} keys of a cache"
    if (
        visibility.causal
        and positions is not None
        and positions.shape == (1, keys)
        and not torch.compiler.is_compiling()
        and bool((positions.diff() <= 0).any())
    ):
        return "positions that restart, as in packed sequences"
    return None


def _is_one_sequence(visibility: Visibility, positions: torch.Tensor | None, batch: int) -> bool:
    """Whether the visibility has several sequences only because the positions of one jump.

    So they do where context_parallel balances causal attention: a rank has one piece of the
    sequence's first half and one of its second. In packed sequences they restart. If one rank
    refused the call, the others would wait for it.
    """
    rows = visibility.rows
    if rows is None or visibility.by_mask or positions is None or positions.dim() != 2:
        return False
    if positions.is_inference():  # without a version counter changes cannot be detected
        return _has_rows_of_jumps(rows, positions, batch)
    found: tuple[int, Rows, bool] | None = getattr(positions, _ONE_SEQUENCE, None)
    if found is None or found[0] != positions._version or found[1] is not rows:
        found = positions._version, rows, _has_rows_of_jumps(rows, positions, batch)
        setattr(positions, _ONE_SEQUENCE, found)
    return found[2]


def _has_rows_of_jumps(rows: Rows, positions: torch.Tensor, batch: int) -> bool:
    """Whether the rows begin where positions jump, and no position is below the one before it."""
    jumps = rows_of_jumps(positions, batch)
    return (
        jumps is not None
        and rows.indices_q is rows.indices_k is None
        and rows.offsets_q.shape == jumps.offsets_q.shape
        and bool((positions.diff() > 0).all() and (rows.offsets_q == jumps.offsets_q).all())
    )
