"""Launches the Triton kernels of gated_delta_rule, in one fixed configuration without tuning."""

from __future__ import annotations

from typing import Final

import torch

from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.gated_delta_rule import launch, padding
from flashvar.backends.triton.gated_delta_rule.launch import strides
from flashvar.backends.triton.gated_delta_rule.recurrent import recurrent_kernel
from flashvar.backends.triton.launch_or_compile import Begin
from flashvar.backends.triton.repeated import on_device, start
from flashvar.ops.gated_delta_rule.problem import L2NORM_EPS, Gradients, Inputs
from flashvar.ops.gated_delta_rule.spec import RECURRENT_BELOW

# Elements of a state in a program: 32 registers for each thread of 4 warps.
_ELEMENTS: Final = 4096
_WARPS: Final = 4
_MAX_BLOCK_V: Final = 64


def forward(
    inputs: Inputs,
    initial_state: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor,
    begin: Begin = start,
) -> None:
    """Write out, and the state after each sequence."""
    rows = inputs.q.shape[0] * inputs.q.shape[1]
    few = rows < RECURRENT_BELOW * inputs.sequences
    if few or launch.chunk_tokens(inputs.q) < launch.MIN_CHUNK_TOKENS:
        _recurrent(inputs, initial_state, None, final_state, out, begin)
    elif inputs.head_dim < padding.MIN_HEAD_DIM:
        after = final_state.new_empty(
            *final_state.shape[:2], padding.MIN_HEAD_DIM, final_state.shape[3]
        )
        before = padding.state(initial_state)
        launch.forward(padding.inputs(inputs), before, out, after, begin)
        final_state.copy_(after[:, :, : inputs.head_dim])
    else:
        launch.forward(inputs, initial_state, out, final_state, begin)


def update(
    inputs: Inputs,
    pool: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    begin: Begin = start,
) -> None:
    """As forward, on states pool[indices] in place; a negative index: zeros, not written."""
    _recurrent(inputs, pool, indices, pool, out, begin)


def backward(
    inputs: Inputs,
    initial_state: torch.Tensor | None,
    grad_out: torch.Tensor | None,
    grad_final_state: torch.Tensor | None,
    begin: Begin = start,
) -> Gradients:
    """The gradients of all inputs; an absent gradient of a result counts as zeros."""
    if inputs.head_dim < padding.MIN_HEAD_DIM:
        states = padding.state(initial_state), padding.state(grad_final_state)
        found = launch.backward(padding.inputs(inputs), states[0], grad_out, states[1], begin)
        return padding.gradients(found, inputs.head_dim)
    return launch.backward(inputs, initial_state, grad_out, grad_final_state, begin)


def _recurrent(
    inputs: Inputs,
    before: torch.Tensor | None,
    indices: torch.Tensor | None,
    after: torch.Tensor,
    out: torch.Tensor,
    begin: Begin,
) -> None:
    k, v = inputs.q.shape[-1], inputs.v.shape[-1]
    block_k = power_of_2(k)
    block_v = min(power_of_2(v), _MAX_BLOCK_V, max(_ELEMENTS // block_k, 1))
    programs = inputs.sequences * inputs.heads * -(-v // block_v)
    if programs == 0:
        return
    all_strides = (
        *(*inputs.q.stride(), *inputs.k.stride(), *inputs.v.stride()),
        *(*strides(inputs.g, 3), *inputs.beta.stride()),
        *(*strides(inputs.a_log, 1), *strides(inputs.dt_bias, 1)),
        *(*strides(inputs.cu_seqlens, 1), *strides(indices, 1)),
        *strides(before, 4),
        *after.stride(),
        *out.stride()[:3],
    )
    with on_device(out.device.index):  # Triton launches on the current device
        begin(recurrent_kernel, (programs,))(
            *inputs[:8],
            *(indices, before, after, out),
            *all_strides,
            *(inputs.q.shape[1], after.shape[0], inputs.scale),
            heads=inputs.heads,
            group=inputs.group,
            K=k,
            V=v,
            L2NORM=inputs.qk_l2norm,
            SIGMOID=inputs.beta_sigmoid,
            BETA_SCALE=2.0 if inputs.allow_neg_eigval else 1.0,
            EPS=L2NORM_EPS,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )
