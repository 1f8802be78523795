"""The OpSpec of gated_delta_rule: its functions, its axes, and what runs it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flashvar.ops.op import Axis, OpSpec

FORWARD: Final = "gated_delta_rule_fwd"
BACKWARD: Final = "gated_delta_rule_bwd"
UPDATE: Final = "gated_delta_rule_update"
# Largest head dim of q and k in Triton's backward, whose programs hold whole rows.
MAX_BACKWARD_HEAD_DIM: Final = 256
# Sequences of fewer tokens (varlen: on average) are computed token by token instead of in chunks.
# The first limit is Triton's, the second the binaries'.
RECURRENT_BELOW: Final = 32
RECURRENT_BELOW_COMPILED: Final = 16
# Head dims of binaries are multiples of this, because they read rows 16 bytes at a time.
STEP: Final = 8

# The head dim of q and k. Binaries support any head dim of v.
HEAD_DIM: Final = Axis(
    "head_dim",
    "head dim",
    at_least=True,
    multiple=64,
    compiled_to=MappingProxyType({FORWARD: 256, BACKWARD: 256, UPDATE: 256}),
    usual=((64,), (128,)),
)

SPEC: Final = OpSpec(
    "gated_delta_rule",
    (FORWARD, BACKWARD, UPDATE),
    (HEAD_DIM,),
    # fp16 lacks the range for gradients of states.
    compiled=MappingProxyType(
        {FORWARD: ("bf16", "fp16"), BACKWARD: ("bf16",), UPDATE: ("bf16", "fp16")}
    ),
    # Without tensor cores the chunks need more shared memory than a block has on 7.5.
    triton=MappingProxyType(dict.fromkeys(("bf16", "fp16", "fp32"), (8, 0))),
    warmup="flashvar.ops.gated_delta_rule.warmup",
    speed=MappingProxyType(
        {
            "gated_delta_rule": "flashvar.ops.gated_delta_rule.speed",
            UPDATE: "flashvar.ops.gated_delta_rule.update_speed",
        }
    ),
    verify="flashvar.ops.gated_delta_rule.verify",
)
