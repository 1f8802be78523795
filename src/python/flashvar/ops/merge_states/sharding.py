"""Sharding rules of merge_states for torch's DTensor.

Rows are independent. Tensors that are sharded over the batch, the sequence or the heads, or over
packed rows, are merged where they are; other placements are gathered first, as for every op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashvar.ops.merge_states.inputs import output_layout
from flashvar.ops.sharding import Way, register, rule_of


def register_sharding_rules() -> None:
    """Register the rules with DTensor, once it is imported."""
    forward = torch.ops.flashvar.merge_states_fwd.default
    backward = torch.ops.flashvar.merge_states_bwd.default
    register({op: rule_of(op, _rows) for op in (forward, backward)})


# torch.compile calls the function at trace time, instead of tracing it.
register_sharding_rules._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _rows(arguments: Mapping[str, Any]) -> Iterator[Way]:
    layout, before = arguments["layout"], 1 if arguments["stacked"] else 0
    packed = len(arguments["outs"][0].shape) - before == 3
    of_lse = "hs" if packed else "bhs"
    # "bhsd->bshd" is that of outs, then that of the result.
    of_out, of_result = ("shd", "shd") if packed else (layout[:4], output_layout(layout))
    for name in of_lse:
        out, lse, result = (names.index(name) for names in (of_out, of_lse, of_result))
        yield Way(
            {"outs": out + before, "lses": lse + before, "grad_out": result, "grad_lse": lse},
            # Gradients are stacked, also those of parts that are not.
            {"out": result, "lse": lse, "grad_outs": out + 1, "grad_lses": lse + 1},
        )
