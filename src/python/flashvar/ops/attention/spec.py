"""The OpSpec of attention: its functions, its axis head_dim, and what Triton can run."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flashvar.ops.op import Axis, OpSpec

# The kernels read rows 16 bytes at a time, and keep whole rows of the output in registers.
HEAD_DIM_STEP: Final = 8
HEAD_DIM_MAX: Final = 512
_COMPILED_TO: Final = 256  # larger ones run on Triton

FORWARD: Final = "attention_fwd"
BACKWARD: Final = "attention_bwd"

# The head dim of queries and keys, and that of values.
HEAD_DIM: Final = Axis(
    "head_dim",
    "head dim",
    at_least=True,
    pairs=True,
    step=HEAD_DIM_STEP,
    maximum=HEAD_DIM_MAX,
    compiled_to=MappingProxyType(dict.fromkeys((FORWARD, BACKWARD), _COMPILED_TO)),
    triton_below=((8, 0), 256),  # their shared memory has no room for larger rows in float32
    cheap=64,  # up to here a kernel is memory-bound
    usual=((64, 64), (128, 128)),
)

SPEC: Final = OpSpec(
    "attention",
    (FORWARD, BACKWARD),
    (HEAD_DIM,),
    compiled=MappingProxyType(dict.fromkeys((FORWARD, BACKWARD), ("bf16", "fp16"))),
    triton=MappingProxyType({"bf16": (8, 0), "fp16": (7, 5), "fp32": (7, 5)}),
    warmup="flashvar.ops.attention.warmup",
    tune="flashvar.ops.attention.tune",
    speed=MappingProxyType({"attention": "flashvar.ops.attention.speed"}),
    verify="flashvar.ops.attention.verify",
)
