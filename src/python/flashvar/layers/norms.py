"""Root-mean-square norms, plain and with an output gate, in float32 inside."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from flashvar.errors import InvalidInputError


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
        self.hidden_size = hidden_size
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised x."""
        return self._normalised(x).to(x.dtype)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


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
        if activation not in ("swish", "silu", "sigmoid"):
            raise InvalidInputError(
                f"activation must be 'swish', 'silu' or 'sigmoid', got {activation!r}: leave it "
                "out for 'swish'"
            )
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = activation

    def extra_repr(self) -> str:
        """What the constructor got."""
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The normalised x, gated by g of its shape."""
        y = self._normalised(x)
        gate = g.to(y.dtype)
        gate = gate.sigmoid() if self.activation == "sigmoid" else functional.silu(gate)
        return (y * gate).to(x.dtype)
