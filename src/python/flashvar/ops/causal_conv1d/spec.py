"""The OpSpec of causal_conv1d: its functions, its axes, and what runs it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flashvar.ops.op import OpSpec

FORWARD: Final = "causal_conv1d_fwd"
BACKWARD: Final = "causal_conv1d_bwd"
UPDATE: Final = "causal_conv1d_update"

SPEC: Final = OpSpec(
    "causal_conv1d",
    (FORWARD, BACKWARD, UPDATE),
    usual_dtypes=("bf16", "fp16", "fp32"),
    compiled=MappingProxyType(dict.fromkeys((FORWARD, BACKWARD, UPDATE), ("bf16", "fp16", "fp32"))),
    triton=MappingProxyType({"bf16": (8, 0), "fp16": (7, 5), "fp32": (7, 5)}),
    warmup="flashvar.ops.causal_conv1d.warmup",
    speed=MappingProxyType({"causal_conv1d": "flashvar.ops.causal_conv1d.speed"}),
    verify="flashvar.ops.causal_conv1d.verify",
)
