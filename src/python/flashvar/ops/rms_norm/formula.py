"""The norms and their gradients in torch's own functions, in float32 or wider inside."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """The options of the ops."""

    eps: float
    mean: bool  # of the squares; False: their sum, the L2 norm
    sigmoid: bool  # the gate's activation; False: swish
    dtype: torch.dtype  # of the result
    total_dtype: torch.dtype | None  # of the sum of x and the residual; None: not wanted


class Tensors(NamedTuple):
    """The tensors of the ops, which the last dimension normalizes."""

    x: torch.Tensor
    gate: torch.Tensor | None  # like x
    weight: torch.Tensor | None  # [the size of the last dimension]
    bias: torch.Tensor | None
    residual: torch.Tensor | None  # like x


class Gradients(NamedTuple):
    """Those of the tensors; None of what is absent."""

    x: torch.Tensor
    gate: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None


def forward(tensors: Tensors, norm: Norm) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and the sum of x and the residual if it is wanted."""
    total = _sum(tensors)
    y = _affine(total * _factor(total, norm), tensors)
    if tensors.gate is not None:
        gate = tensors.gate.to(y.dtype)
        y = y * (gate.sigmoid() if norm.sigmoid else torch.nn.functional.silu(gate))
    kept = None if norm.total_dtype is None else total.to(norm.total_dtype)
    return y.to(norm.dtype), kept


def backward(
    grad_y: torch.Tensor, grad_total: torch.Tensor | None, tensors: Tensors, norm: Norm
) -> Gradients:
    """The gradients, where gate and residual have the shape of x."""
    x, gate, weight, bias, residual = tensors
    total = _sum(tensors)
    factor = _factor(total, norm)
    normal, grad = total * factor, grad_y.to(total.dtype)
    of_gate = None
    if gate is not None:
        wide = gate.to(total.dtype)
        activation, slope = wide.sigmoid(), 1 - wide.sigmoid()
        if norm.sigmoid:
            slope = activation * slope
        else:
            slope = activation * (1 + wide * slope)
            activation = wide * activation
        of_gate = (grad * _affine(normal, tensors) * slope).to(gate.dtype)
        grad = grad * activation
    of_weight, of_bias = (
        None if one is None else rows.reshape(-1, x.shape[-1]).sum(0).to(one.dtype)
        for one, rows in ((weight, grad * normal), (bias, grad))
    )
    if weight is not None:
        grad = grad * weight.to(grad.dtype)
    shared = _reduced(grad * normal, norm)
    of_total = factor * (grad - normal * shared)
    if grad_total is not None:
        of_total = of_total + grad_total
    of_residual = None if residual is None else of_total.to(residual.dtype)
    return Gradients(of_total.to(x.dtype), of_gate, of_weight, of_bias, of_residual)


def _sum(tensors: Tensors) -> torch.Tensor:
    x = tensors.x.to(torch.promote_types(tensors.x.dtype, torch.float32))
    return x if tensors.residual is None else x + tensors.residual


def _factor(total: torch.Tensor, norm: Norm) -> torch.Tensor:
    return torch.rsqrt(_reduced(total.square(), norm) + norm.eps)


def _reduced(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return x.mean(-1, keepdim=True) if norm.mean else x.sum(-1, keepdim=True)


def _affine(normal: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    if tensors.weight is not None:
        normal = normal * tensors.weight.to(normal.dtype)
    return normal if tensors.bias is None else normal + tensors.bias.to(normal.dtype)
