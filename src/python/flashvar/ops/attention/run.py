"""A forward and a backward of attention, below autograd and the dispatcher.

Arguments come in the order of the schemas: tensors, then options.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.ops.attention import plan as plans
from flashvar.ops.attention.problem import Gradients, Inputs, Options, Wanted

_TENSORS: Final = len(Inputs._fields)

FiveGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def split(arguments: tuple[Any, ...]) -> tuple[Inputs, Options]:
    """The tensors and the options of a forward."""
    return Inputs._make(arguments[:_TENSORS]), Options._make(arguments[_TENSORS:])


def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and its log-sum-exp."""
    return plans.forward(*split(arguments))


def backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wants_bias: bool,
    wants_sinks: bool,
    *arguments: Any,
) -> FiveGradients:
    """The gradients of q, k, v, bias and sinks; empty for the last two unless they are wanted."""
    inputs, options = split(arguments)
    wanted = Wanted(wants_bias, wants_sinks)
    return of_schema(plans.backward(grad_out, grad_lse, inputs, out, lse, options, wanted), lse)


def of_schema(grads: Gradients, lse: torch.Tensor) -> FiveGradients:
    """The gradients as the schema has them: tensors, empty in place of None."""
    of_bias, of_sinks = (lse.new_empty(0) if x is None else x for x in grads[3:])
    return grads.q, grads.k, grads.v, of_bias, of_sinks
