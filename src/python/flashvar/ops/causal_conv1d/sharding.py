"""Sharding rules of causal_conv1d for torch's DTensor.

Sequences are independent, and so are channels: shards over either are computed where they are.
DTensor gathers tensors of other placements first, as for every op. An update writes its states in
place, so it takes no other placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from flashvar.ops.sharding import PARTIAL, Way, check_in_place, register, rule_of

# By their names in the schemas; a gradient has the placement of what it is of.
_TOKENS: Final = ("x", "residual", "y", "grad_y", "grad_x")
_STATES: Final = ("state", "final_state", "grad_final", "grad_state")
_PARAMETERS: Final = ("weight", "bias", "grad_weight", "grad_bias")
_GRADIENTS: Final = {"grad_bias": "bias", "grad_state": "state"}


def register_sharding_rules() -> None:
    """Register the rules with DTensor, once it is imported."""
    ops = torch.ops.flashvar
    forward, backward = ops.causal_conv1d_fwd.default, ops.causal_conv1d_bwd.default
    update = ops.causal_conv1d_update.default
    register(
        {
            forward: rule_of(forward, _forward),
            backward: rule_of(backward, _backward),
            update: rule_of(update, _update, "state"),
        }
    )


# torch.compile calls the function at trace time, instead of tracing it.
register_sharding_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_written_shards(*arguments: Any) -> None:
    """Refuse DTensors of an update, arguments of its op, whose state would be copied."""
    op = torch.ops.flashvar.causal_conv1d_update.default
    check_in_place(op, "causal_conv1d_update", "state", arguments, _update)


def _channels(dims: int, layout: str) -> Way:
    channels = dims - (1 if layout == "btd" else 2)
    found = {
        **dict.fromkeys(_TOKENS, channels),
        **dict.fromkeys(_STATES, 1),
        **dict.fromkeys(_PARAMETERS, 0),
    }
    return Way(found, found)


def _batch(arguments: Mapping[str, Any]) -> Iterator[Way]:
    packed = arguments.get("cu_seqlens") is not None
    if not packed and arguments.get("state_indices") is None:
        found = {**dict.fromkeys((*_TOKENS, *_STATES), 0), "state_positions": 0}
        yield Way(found, {**found, **dict.fromkeys(_PARAMETERS, PARTIAL)})


def _forward(arguments: Mapping[str, Any]) -> Iterator[Way]:
    yield _channels(len(arguments["x"].shape), arguments["layout"])
    yield from _batch(arguments)


def _backward(arguments: Mapping[str, Any]) -> Iterator[Way]:
    for way in _forward(arguments):
        absent = {name for name, of in _GRADIENTS.items() if arguments[of] is None}
        results = {name: dim for name, dim in way.results.items() if name not in absent}
        yield Way(way.arguments, results)


def _update(arguments: Mapping[str, Any]) -> Iterator[Way]:
    dims = len(arguments["x"].shape)
    # One token of each sequence is [batch, dim] in every layout.
    yield _channels(dims, "btd" if dims == 2 else arguments["layout"])
    yield from _batch(arguments)
