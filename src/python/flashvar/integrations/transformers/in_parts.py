"""Attention of a layer inside torch's context_parallel, where tensors are parts of sequences."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional

from flashvar.errors import BackendUnavailableError
from flashvar.integrations.fallback import report_fallback
from flashvar.integrations.torch import flash as torch_flash
from flashvar.integrations.torch.attribute import REPLACED
from flashvar.integrations.transformers.layout import Layout
from flashvar.integrations.transformers.own_path import ONLY_EAGER, ONLY_ITS_OWN, Call
from flashvar.integrations.transformers.rows import rows_of

__all__ = ["distributed_attention"]

_NOT_TORCHS: Final = (*ONLY_EAGER, *ONLY_ITS_OWN, "position_bias", "cache")


def distributed_attention(
    module: torch.nn.Module, call: Call, layout: Layout, others: dict[str, Any]
) -> torch.Tensor:
    """Attention over the whole sequences, [batch, seqlen_q, heads_q, head_dim_v].

    Calls torch's function, which context_parallel has replaced. Flashvar serves its steps if
    flashvar is torch's flash attention.

    Raises:
        BackendUnavailableError: context_parallel does not support the call; or FLASHVAR_STRICT=1,
            and flashvar served none of its steps.
    """
    name = type(module).__name__
    found = _beyond_torchs(call, layout, others)
    if found is not None:
        raise BackendUnavailableError(
            f"{name}: expected attention that torch's context_parallel supports, causal or full, "
            f"found {found}: run the model outside of it"
        )
    query, key, value = call.query, call.key, call.value
    before = torch_flash.SERVED.of_this_thread()
    out: torch.Tensor = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=call.dropout,
        is_causal=layout.causal,
        scale=call.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    served = torch_flash.SERVED.of_this_thread() - before
    if not torch.compiler.is_compiling() and not served:
        report_fallback(name, REPLACED, "that one")
    return out.transpose(1, 2)


def _beyond_torchs(call: Call, layout: Layout, others: dict[str, Any]) -> str | None:
    """The feature of a call that context_parallel does not support, in words; None without one."""
    given = {**others, **call._asdict()}
    for name in _NOT_TORCHS:
        if given.get(name) is not None and given[name] is not False:
            return name
    positions = others.get("position_ids")
    if layout.rows is not None and not _is_one_sequence(layout, positions, call.query.shape[0]):
        return "padding or packed sequences"
    if layout.bias is not None:
        return "a mask"
    if layout.window != (-1, -1):
        return "a sliding window"
    queries, keys = call.query.shape[2], call.key.shape[2]
    if layout.keys != keys or (layout.causal and queries != keys):
        return f"{queries} queries with {keys} keys of a cache"
    if (
        layout.causal
        and positions is not None
        and positions.shape == (1, keys)
        and not torch.compiler.is_compiling()
        and bool((positions.diff() <= 0).any())
    ):
        return "positions that restart, as in packed sequences"
    return None


def _is_one_sequence(layout: Layout, positions: torch.Tensor | None, batch: int) -> bool:
    """Whether rows are those of transformers, which takes positions that jump for new sequences.

    The positions of a part jump where context_parallel balances causal attention: it has one piece
    from the sequence's first half and one from its second. In packed sequences they restart. One
    rank that refused the call would leave the others waiting.
    """
    rows = layout.rows
    if rows is None or layout.by_mask or positions is None or positions.dim() != 2:
        return False
    steps = positions.diff()
    numbers = functional.pad(steps != 1, (1, 0)).cumsum(-1) + 1
    jumps = rows_of(numbers.expand(batch, -1))
    return (
        jumps is not None
        and rows.indices_q is rows.indices_k is None
        and rows.offsets_q.shape == jumps.offsets_q.shape
        and bool((steps > 0).all() and (rows.offsets_q == jumps.offsets_q).all())
    )
