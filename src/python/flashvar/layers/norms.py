"""Root-mean-square norms, plain and with an output gate, and the L2 norm, in float32 inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashvar.errors import InvalidInputError
from flashvar.ops.arguments import size
from flashvar.ops.rms_norm.torch_library import normalize


class RMSNorm(nn.Module):  # type: ignore[misc]
    """x / sqrt(mean(x^2) + eps) * weight + bias, over the last dimension, in the dtype of x."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size = size("hidden_size", hidden_size)
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            value = torch.empty(hidden_size, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value) if wanted else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of 1, biases of 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """What the constructor got."""
        return f"{self.hidden_size}, eps={self.eps}"

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """As `rms_norm`."""
        return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class FusedRMSNormGated(RMSNorm):
    """The norm of x times the activation of a gate: "swish" (or "silu"), or "sigmoid"."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_activation(activation)
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = activation

    def extra_repr(self) -> str:
        """What the constructor got."""
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """As `rms_norm_gated`."""
        return rms_norm_gated(
            *(x, g, self.weight, self.bias, self.activation),
            *(residual, prenorm, residual_in_fp32, self.eps),
        )


class L2Norm(nn.Module):  # type: ignore[misc]
    """As `l2norm`."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.output_dtype = output_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalized x."""
        return l2norm(x, self.eps, self.output_dtype)


def l2norm(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in the dtype of x or another one."""
    dtype = x.dtype if output_dtype is None else output_dtype
    return normalize((x, None, None, None, None), (eps, False, False, dtype, None))[0]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """The normalized sum of x and a residual, in the dtype of x.

    With `prenorm` also the sum itself, in the dtype of the residual; without one in float32 if
    `residual_in_fp32`, else in the dtype of x.
    """
    tensors = (x, None, weight, bias, residual)
    return _rms_norm(tensors, eps, False, prenorm, residual_in_fp32)


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    """As `rms_norm`, times the activation of a gate: "swish" (or "silu"), or "sigmoid".

    The gate may have other dimensions before the last one, with as many rows as x.
    """
    _check_activation(activation)
    if g.shape != x.shape and g.shape[-1] == x.shape[-1] and g.numel() == x.numel():
        g = g.reshape(x.shape)
    tensors = (x, g, weight, bias, residual)
    return _rms_norm(tensors, eps, activation == "sigmoid", prenorm, residual_in_fp32)


def _check_activation(activation: str) -> None:
    if activation not in ("swish", "silu", "sigmoid"):
        raise InvalidInputError(
            f"activation must be 'swish', 'silu' or 'sigmoid', found {activation!r}: leave it out "
            "for 'swish'"
        )


def _rms_norm(
    tensors: tuple[Any, ...], eps: float, sigmoid: bool, prenorm: bool, in_fp32: bool
) -> Any:
    x, _, _, _, residual = tensors
    kept = None
    if prenorm and residual is not None:
        kept = residual.dtype
    elif prenorm and in_fp32 and x.dtype != torch.float32:
        kept = torch.float32
    y, total = normalize(tensors, (eps, True, sigmoid, x.dtype, kept))
    return (y, x if total is None else total) if prenorm else y
