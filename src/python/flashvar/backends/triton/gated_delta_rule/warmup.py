"""Compile the Triton kernels of gated_delta_rule for a GPU that is not in this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashvar.backends.triton import gated_delta_rule as launches
from flashvar.backends.triton.absent_device import set_target
from flashvar.backends.triton.launch_or_compile import compile_only
from flashvar.ops.gated_delta_rule.problem import Inputs
from flashvar.ops.gated_delta_rule.warmup import inputs_of

if TYPE_CHECKING:
    from flashvar.ops.gated_delta_rule.warmup import Kind


def compile_for(kind: Kind, tokens: int, capability: tuple[int, int]) -> None:
    """Compile the kernels of a kind of call; Triton finds them where there is such a device.

    Afterwards this process cannot launch Triton kernels.
    """
    set_target(capability)
    inputs = _inputs(kind, tokens)
    out = torch.empty_like(inputs.v)
    states = torch.zeros(1, inputs.heads, kind.head_dim, kind.head_dim_v)
    launches.forward(inputs, None, out, states, compile_only)
    if kind.training:
        launches.backward(inputs, None, out, None, compile_only)
    else:
        one = _inputs(kind, 1)
        indices = torch.zeros(1, dtype=torch.int32)
        launches.update(one, states, indices, torch.empty_like(one.v), compile_only)


def _inputs(kind: Kind, tokens: int) -> Inputs:
    given = inputs_of(kind, tokens, "cpu")
    return Inputs(
        **{name: given[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")},
        a_log=given.get("A_log"),
        dt_bias=given.get("dt_bias"),
        scale=kind.head_dim**-0.5,
        qk_l2norm=kind.raw,
        beta_sigmoid=kind.raw,
        allow_neg_eigval=False,
    )
