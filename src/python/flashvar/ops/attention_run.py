"""A forward and a backward of attention, below autograd and the dispatcher."""

from __future__ import annotations

import torch

from flashvar.ops.attention_padding import cut, pad, pad_inputs, wants_padding
from flashvar.ops.attention_plan import backward_plan, plan
from flashvar.ops.attention_problem import Gradients, Inputs, Options


def forward(inputs: Inputs, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and its log-sum-exp."""
    q, k, v, *extras = inputs
    out, lse = plan(q, k, v, tuple(extras), options).run(inputs, with_lse=True)
    assert lse is not None
    return out, lse


def backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    wants_bias: bool,
) -> Gradients:
    """The gradients of q, k, v and, where it is wanted, of the bias in float32.

    An absent `grad_out` or `grad_lse` counts as zeros.
    """
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    q, k, v, *extras = inputs
    problem = plan(q, k, v, tuple(extras), options).problem
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if wants_padding(problem, options.backend):
        padded = backward(
            pad(grad_out),
            grad_lse,
            pad_inputs(inputs),
            pad(out),
            lse,
            options._replace(scale=problem.scale),
            wants_bias,
        )
        return cut(padded, inputs)
    if grad_out.stride(-1) != 1 and grad_out.shape[-1] > 1:
        grad_out = grad_out.contiguous()
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    chosen = backward_plan(inputs, options, grad_out, grad_lse is not None, wants_bias)
    return chosen.run(inputs, out.contiguous(), lse.contiguous(), grad_out, grad_lse)
