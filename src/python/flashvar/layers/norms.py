"""Root-mean-square norms, plain and with an output gate, and the L2 norm, in float32 inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashvar.errors import InvalidInputError
from flashvar.ops.arguments import size
from flashvar.ops.rms_norm.torch_library import normalize
from flashvar.ops.unknown_sizes import differ, is_known


class RMSNorm(nn.Module):  # type: ignore[misc]
    """x / sqrt(mean(x^2) + eps) * weight + bias, over the last dimension, in the dtype of x.

    This is the root-mean-square norm (Zhang and Sennrich 2019).

    Args:
        hidden_size: The size of the last dimension of x.
        elementwise_affine: Have a weight, [hidden_size].
        bias: Have a bias too, [hidden_size].
        eps: Added to the mean of squares.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
    """

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
        """Normalize x.

        Args:
            x: [..., hidden_size].
            residual: As in `rms_norm`.
            prenorm: As in `rms_norm`.
            residual_in_fp32: As in `rms_norm`.

        Returns:
            As `rms_norm`.
        """
        return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class FusedRMSNormGated(RMSNorm):
    """The norm of x times the activation of a gate.

    Args:
        hidden_size: The size of the last dimension of x.
        elementwise_affine: Have a weight, [hidden_size].
        eps: Added to the mean of squares.
        activation: "swish" or "silu", which mean the same, or "sigmoid".
        device: The device of the weight.
        dtype: The dtype of the weight.

    Raises:
        InvalidInputError: the activation is another one.
    """

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
        """Normalize x, and multiply by the gate.

        Args:
            x: [..., hidden_size].
            g: The gate, as in `rms_norm_gated`.
            residual: As in `rms_norm`.
            prenorm: As in `rms_norm`.
            residual_in_fp32: As in `rms_norm`.

        Returns:
            As `rms_norm_gated`.
        """
        return rms_norm_gated(
            *(x, g, self.weight, self.bias, self.activation),
            *(residual, prenorm, residual_in_fp32, self.eps),
        )


class L2Norm(nn.Module):  # type: ignore[misc]
    """x / sqrt(sum(x^2) + eps) over the last dimension.

    Args:
        eps: Added to the sum of squares.
        output_dtype: The dtype of the output; that of x by default.
    """

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.output_dtype = output_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x, as `l2norm`."""
        return l2norm(x, self.eps, self.output_dtype)


def l2norm(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension.

    Args:
        x: Of any shape, floating-point.
        eps: Added to the sum of squares.
        output_dtype: The dtype of the output; that of x by default.

    Returns:
        The normalized x.
    """
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
    """Normalize x, or the sum of x and a residual: s / sqrt(mean(s^2) + eps) * weight + bias.

    Args:
        x: [..., hidden_size], floating-point.
        weight: [hidden_size], or None for 1.
        bias: [hidden_size], or None for 0.
        residual: Added to x first, in the shape of x.
        eps: Added to the mean of squares.
        prenorm: Also return the sum s, which the next layer takes as its residual.
        residual_in_fp32: Without a residual, return s in float32.

    Returns:
        The norm, in the dtype of x. With `prenorm` a tuple of it and s: in the dtype of the
        residual, or without one in that of x.

    Raises:
        InvalidInputError: a shape, dtype or device is not supported.
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
    """As `rms_norm`, times the activation of a gate.

    Args:
        x: [..., hidden_size], floating-point.
        g: The gate, in the shape of x. It may have other dimensions before the last one, with as
            many rows as x.
        weight: [hidden_size], or None for 1.
        bias: [hidden_size], or None for 0; added before the gate is applied.
        activation: "swish" or "silu", which mean the same, or "sigmoid".
        residual: As in `rms_norm`.
        prenorm: As in `rms_norm`.
        residual_in_fp32: As in `rms_norm`.
        eps: Added to the mean of squares.

    Returns:
        As `rms_norm`.

    Raises:
        InvalidInputError: as in `rms_norm`, or the activation is another one.
    """
    _check_activation(activation)
    of_one_size = not differ(g.shape[-1:], x.shape[-1:]) and not is_known(g.numel() != x.numel())
    if differ(g.shape, x.shape) and of_one_size:
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
