"""Sharding rules of gated_delta_rule for torch's DTensor.

Sequences are independent, and so are heads: shards over either are computed where they are. A head
of q and k stays with the heads of v that it goes with. DTensor gathers tensors of other placements
first, as for every op. An update writes its states in place, so it takes no other placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from flashvar.ops.sharding import (
    PARTIAL,
    Way,
    check_in_place,
    groups_stay_together,
    present,
    register,
    rule_of,
)

# Dimensions of tensors by their names in the schemas. Those of the states of an update are a pool.
_BATCH: Final = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "out", "grad_out"), 0),
    **dict.fromkeys(("initial_state", "final_state", "grad_final_state"), 0),
}
_HEADS: Final = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "out", "grad_out"), 2),
    **dict.fromkeys(("a_log", "dt_bias"), 0),
    **dict.fromkeys(("initial_state", "final_state", "grad_final_state", "states"), 1),
}


def register_sharding_rules() -> None:
    """Register the rules with DTensor, once it is imported."""
    ops = torch.ops.flashvar
    forward, backward = ops.gated_delta_rule_fwd.default, ops.gated_delta_rule_bwd.default
    update = ops.gated_delta_rule_update.default
    register(
        {
            forward: rule_of(forward, _forward),
            backward: rule_of(backward, _backward),
            update: rule_of(update, _update, "states"),
        }
    )


# torch.compile calls the function at trace time, instead of tracing it.
register_sharding_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_written_shards(*tensors: Any) -> None:
    """Refuse DTensors of an update, in the order of its schema, whose states would be copied."""
    op = torch.ops.flashvar.gated_delta_rule_update.default
    check_in_place(op, "gated_delta_rule", "states", tensors, _update)


def _heads(arguments: Mapping[str, Any]) -> Iterator[Way]:
    q, v = arguments["q"], arguments["v"]
    heads, of_v = q.shape[2], v.shape[2]
    mesh = getattr(q, "mesh", None) or q.device_mesh
    if heads and groups_stay_together(heads, of_v // heads, mesh):
        yield Way(_HEADS, _HEADS)


def _batch(arguments: Mapping[str, Any]) -> Iterator[Way]:
    if arguments.get("cu_seqlens") is None:
        yield Way(_BATCH, _BATCH)


def _forward(arguments: Mapping[str, Any]) -> Iterator[Way]:
    yield from _heads(arguments)
    yield from _batch(arguments)


def _backward(arguments: Mapping[str, Any]) -> Iterator[Way]:
    for way in _heads(arguments):
        yield Way(way.arguments, present(arguments, way.results))
    sums = dict.fromkeys(("a_log", "dt_bias"), PARTIAL)
    for way in _batch(arguments):
        yield Way(way.arguments, present(arguments, {**way.results, **sums}))


def _update(arguments: Mapping[str, Any]) -> Iterator[Way]:
    return _heads(arguments)
