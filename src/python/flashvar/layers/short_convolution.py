"""A depthwise causal convolution as a layer, with flash-linear-attention's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flashvar.errors import InvalidInputError, ShapeError
from flashvar.ops.arguments import size
from flashvar.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_update
from flashvar.ops.unknown_sizes import is_known


def refuse_context_parallel(cp_context: Any) -> None:
    """Refuse a sequence that is split over processes, whose parts would be taken for wholes."""
    if cp_context is not None:
        raise InvalidInputError(
            f"cp_context must be None, found {type(cp_context).__name__}: give each process whole "
            "sequences, or some of the heads as DTensors"
        )


def _may_be_steps(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> bool:
    """Whether packed sequences have one token each, as far as their number says."""
    return cu_seqlens is not None and not is_known(x.shape[1] != cu_seqlens.shape[0] - 1)


class ShortConvolution(nn.Conv1d):  # type: ignore[misc]
    """A causal convolution of each channel, with the parameters of a grouped nn.Conv1d.

    Args:
        hidden_size: The number of channels.
        kernel_size: The width of the filter, at least 2; kernels have 2 to 4.
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
                f"activation must be 'silu', 'swish' or None, found {activation!r}: apply another "
                "one to the output"
            )
        hidden_size = size("hidden_size", hidden_size)
        kernel_size = size("kernel_size", kernel_size)
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
        *,
        seq_idx: torch.Tensor | None = None,
        cp_context: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the state after it or None.

        Args:
            x: [batch, seqlen, hidden_size]; batch is 1 with cu_seqlens.
            residual: Added after the activation; the shape of x.
            mask: [batch, seqlen], 0 for tokens to be replaced by zeros.
            cache: The state before x, [sequences, hidden_size, kernel_size]. It is updated in place
                if x has one token of each sequence, packed or not, and gradients are off.
            output_final_state: Also return the state after x.
            cu_seqlens: The offsets of packed sequences.
            chunk_indices: Not needed.
            seq_idx: The sequence of each token, [batch, seqlen], in place of cu_seqlens and of the
                state after x.
            cp_context: Refused: a sequence may not be split over processes.
            **kwargs: Not used.
        """
        refuse_context_parallel(cp_context)
        if mask is not None:
            if cu_seqlens is not None:
                raise InvalidInputError(
                    "mask must come without cu_seqlens, found both: leave padding out of packed "
                    "rows"
                )
            if mask.dim() != 2 or mask.shape[1] != x.shape[1]:  # it would be broadcast
                raise ShapeError(
                    f"mask must be [batch, seqlen], that is {tuple(x.shape[:2])}, found "
                    f"{tuple(mask.shape)}: pass the columns of the tokens of x"
                )
            x = x * mask.unsqueeze(-1).to(x.dtype)
        weight = self.weight.squeeze(1)
        one_token = cu_seqlens is None and seq_idx is None and x.shape[1] == 1
        if one_token and cache is not None and not torch.is_grad_enabled():
            return self.step(x, residual, cache, bool(output_final_state))
        width = self.kernel_size[0] if output_final_state and cache is None else None
        updates = cache is not None and not torch.is_grad_enabled() and _may_be_steps(x, cu_seqlens)
        found = causal_conv1d(
            x,
            weight,
            self.bias,
            activation=self._activation,
            residual=residual,
            initial_state=cache,
            return_final_state=updates or bool(output_final_state),
            state_len=width,
            cu_seqlens=cu_seqlens,
            seq_idx=seq_idx,
        )
        y, state = found if isinstance(found, tuple) else (found, None)
        if updates:
            assert cache is not None
            assert cu_seqlens is not None
            # Without waiting for a device: a sequence may be empty, and another one longer.
            cache.copy_(torch.where((cu_seqlens.diff() == 1).all(), state, cache))
        return y, state if output_final_state else None

    def step(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cache: torch.Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of one token of each sequence, without gradients; the cache is updated.

        Args:
            x: [sequences, 1, hidden_size]; with cu_seqlens [1, sequences, hidden_size].
            residual: Added after the activation; the shape of x.
            cache: The state before x, [sequences, hidden_size, kernel_size]; zeros by default.
            output_final_state: Also return the cache.
            cu_seqlens: The offsets of packed sequences, of one token each.
        """
        rows = x if cu_seqlens is None else x.transpose(0, 1)
        if cache is None:
            cache = x.new_zeros(rows.shape[0], self.hidden_size, self.kernel_size[0])
        if cu_seqlens is not None and residual is not None:
            residual = residual.transpose(0, 1)
        weight = self.weight.squeeze(1)
        y = causal_conv1d_update(
            rows, cache, weight, self.bias, activation=self._activation, residual=residual
        )
        return y.view(x.shape), cache if output_final_state else None

    @property
    def _activation(self) -> Any:
        return self.activation
