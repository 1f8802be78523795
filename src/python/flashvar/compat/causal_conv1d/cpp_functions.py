"""The module `causal_conv1d.cpp_functions`: forward, backward and update, below autograd.

They are for code that has its own autograd function, such as mamba-ssm: autograd does not record
them, and the backward can write into a given tensor.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from flashvar.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from flashvar.errors import InvalidInputError
from flashvar.ops.causal_conv1d.sequence_ids import behind_state, ends_of, pack, unpack

__all__ = [
    "causal_conv1d_bwd_function",
    "causal_conv1d_fwd_function",
    "causal_conv1d_update_function",
]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@torch.no_grad()  # type: ignore[untyped-decorator]
def causal_conv1d_fwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    final_states_out: torch.Tensor | None,
    silu_activation: bool,
) -> torch.Tensor:
    """The output of `causal_conv1d_fn`; the states after it are written where they are wanted."""
    found = causal_conv1d_fn(
        *(x, weight, bias, seq_idx, initial_states, final_states_out is not None, final_states_out),
        activation=_activation(silu_activation),
    )
    out: torch.Tensor = found if final_states_out is None else found[0]
    return out


@torch.no_grad()  # type: ignore[untyped-decorator]
def causal_conv1d_bwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dx: torch.Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> Gradients:
    """The gradients of x, weight, bias and initial states; that of x is written into dx."""
    op = torch.ops.flashvar.causal_conv1d_bwd.default
    if seq_idx is None:
        of_x, of_weight, of_bias, of_states = op(
            *(dout, dfinal_states, x, weight, bias, initial_states, None),
            *(bool(silu_activation), "bdt", "auto"),
        )
    else:
        if dfinal_states is not None:
            raise InvalidInputError(
                "seq_idx must come without dfinal_states, found both: pass sequences that have "
                "final states to flashvar.causal_conv1d with cu_seqlens"
            )
        tokens, past = x.transpose(1, 2), 0
        if initial_states is not None:
            past = weight.shape[1] - 1
            tokens, seq_idx = behind_state(tokens, seq_idx, initial_states, past)
        grads = functional.pad(dout.transpose(1, 2), (0, 0, past, 0))
        of_rows, of_weight, of_bias, _ = op(
            *(
                pack(grads.to(tokens.dtype), seq_idx),
                None,
                pack(tokens, seq_idx),
                weight,
                bias,
                None,
            ),
            *(ends_of(seq_idx), bool(silu_activation), "btd", "auto"),
        )
        of_tokens = unpack(of_rows, seq_idx).transpose(1, 2)
        of_x = of_tokens[..., past:].to(x.dtype)
        of_states = None
        if initial_states is not None:
            of_states = torch.zeros_like(initial_states)
            of_states[..., initial_states.shape[-1] - past :] = of_tokens[..., :past]
    return (
        of_x if dx is None else dx.copy_(of_x),
        of_weight,
        None if bias is None else of_bias,
        of_states if return_dinitial_states and initial_states is not None else None,
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def causal_conv1d_update_function(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu_activation: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> torch.Tensor:
    """As `causal_conv1d_update`, of x [batch, dim, seqlen]."""
    return causal_conv1d_update(
        *(x, conv_state, weight, bias, _activation(silu_activation)),
        *(cache_seqlens, conv_state_indices),
    )


def _activation(silu: bool) -> str | None:
    return "silu" if silu else None
