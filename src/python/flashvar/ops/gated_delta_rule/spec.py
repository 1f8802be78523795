"""The description of gated_delta_rule: its functions, and what serves it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flashvar.ops.op import OpSpec

FORWARD: Final = "gated_delta_rule_fwd"
BACKWARD: Final = "gated_delta_rule_bwd"
UPDATE: Final = "gated_delta_rule_update"
# Of q and k in Triton's backward, which holds whole rows.
MOST_K: Final = 256

SPEC: Final = OpSpec(
    "gated_delta_rule",
    (FORWARD, BACKWARD, UPDATE),
    usual_dtypes=("bf16", "fp16", "fp32"),
    triton=MappingProxyType({"bf16": (8, 0), "fp16": (7, 5), "fp32": (7, 5)}),
    warmup="flashvar.ops.gated_delta_rule.warmup",
    speed="flashvar.ops.gated_delta_rule.speed",
)
