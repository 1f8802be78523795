"""A depthwise causal convolution as a layer, with flash-linear-attention's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashvar.errors import InvalidInputError
from flashvar.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_update


class ShortConvolution(nn.Conv1d):  # type: ignore[misc]
    """A causal convolution of each channel, with the parameters of a grouped nn.Conv1d.

    Args:
        hidden_size: The number of channels.
        kernel_size: The width of the filter, 2 to 4.
        bias: Add a bias.
        activation: "silu", "swish" or None.
        backend: Not used: flashvar chooses.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        **kwargs: Not used.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if activation not in (None, "silu", "swish"):
            raise InvalidInputError(
                f"activation must be 'silu', 'swish' or None, got {activation!r}: apply another "
                "one to the output"
            )
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = backend

    @property
    def state_size(self) -> int:
        """Numbers in the state of one sequence."""
        return int(self.hidden_size * self.kernel_size[0])

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool | None = False,
        cu_seqlens: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the state after it or None.

        Args:
            x: [batch, seqlen, hidden_size]; batch is 1 with cu_seqlens.
            residual: Added after the activation; the shape of x.
            mask: [batch, seqlen], 0 for tokens to be replaced by zeros.
            cache: The state before x, [sequences, hidden_size, kernel_size]. It is updated in place
                if x has one token of each sequence and neither cu_seqlens nor gradients.
            output_final_state: Also return the state after x.
            cu_seqlens: The offsets of packed sequences.
            chunk_indices: Not needed.
            **kwargs: Not used.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise InvalidInputError(
                    "mask must come without cu_seqlens, got both: leave padding out of packed rows"
                )
            x = x * mask.unsqueeze(-1).to(x.dtype)
        weight = self.weight.squeeze(1)
        one_token = x.shape[1] == 1 and cu_seqlens is None
        if one_token and cache is not None and not torch.is_grad_enabled():
            y = causal_conv1d_update(
                x, cache, weight, self.bias, self._activation, residual=residual
            )
            return y, cache if output_final_state else None
        width = self.kernel_size[0] if output_final_state and cache is None else None
        found = causal_conv1d(
            x,
            weight,
            self.bias,
            activation=self._activation,
            residual=residual,
            initial_state=cache,
            return_final_state=bool(output_final_state),
            state_len=width,
            cu_seqlens=cu_seqlens,
        )
        return found if isinstance(found, tuple) else (found, None)

    @property
    def _activation(self) -> Any:
        return self.activation
