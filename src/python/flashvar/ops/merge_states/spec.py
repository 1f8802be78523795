"""The OpSpec of merge_states: its functions, its axes, and what runs it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flashvar.ops.op import OpSpec

FORWARD: Final = "merge_states_fwd"
BACKWARD: Final = "merge_states_bwd"

SPEC: Final = OpSpec(
    "merge_states",
    (FORWARD, BACKWARD),
    usual_dtypes=("bf16", "fp16", "fp32"),
    compiled=MappingProxyType(dict.fromkeys((FORWARD, BACKWARD), ("bf16", "fp16", "fp32"))),
    triton=MappingProxyType({"bf16": (8, 0), "fp16": (7, 5), "fp32": (7, 5)}),
    warmup="flashvar.ops.merge_states.warmup",
    speed=MappingProxyType({"merge_states": "flashvar.ops.merge_states.speed"}),
    verify="flashvar.ops.merge_states.verify",
)
