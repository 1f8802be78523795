"""A forward and a backward of attention, below autograd and the dispatcher."""

from __future__ import annotations

import torch

from flashvar.ops.attention.padding import cut, pad, pad_inputs
from flashvar.ops.attention.plan import NO_EXTRAS, Extras, backward_plan, plan
from flashvar.ops.attention.problem import Gradients, Inputs, Options


def forward(inputs: Inputs, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and its log-sum-exp."""
    q, k, v = inputs[:3]
    out, lse = plan(q, k, v, _extras(inputs), options).run(inputs, with_lse=True)
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
    """The gradients of q, k, v and, where it is wanted, of the bias.

    An absent `grad_out` or `grad_lse` counts as zeros.
    """
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    extras = _extras(inputs)
    chosen = backward_plan(inputs, extras, options, grad_out, wants_bias)
    if not chosen.pads:
        return chosen.run(inputs, out, lse, grad_out, grad_lse)
    padded = backward(
        pad(grad_out),
        grad_lse,
        pad_inputs(inputs),
        pad(out),
        lse,
        options._replace(scale=chosen.problem.forward.scale),
        wants_bias,
    )
    return cut(padded, inputs)


def _extras(inputs: Inputs) -> Extras:
    extras = inputs[3:]
    return NO_EXTRAS if all(x is None for x in extras) else extras
