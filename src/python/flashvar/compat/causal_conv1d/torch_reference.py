"""The convolution in torch's own functions, which tests of the package compare with.

No kernel of flashvar computes these functions, and they compute in the dtype of the weight.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from flashvar.errors import InvalidInputError
from flashvar.ops.autocast import without_promotion
from flashvar.ops.causal_conv1d.inputs import ACTIVATIONS
from flashvar.ops.dispatch_modes import as_list

__all__ = ["causal_conv1d_ref", "causal_conv1d_update_ref", "causal_conv1d_varlen_states_ref"]


def causal_conv1d_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: Any = None,
) -> Any:
    """As `causal_conv1d_fn` without `seq_idx`."""
    before = initial_states
    if before is None:
        before = x.new_zeros(*x.shape[:2], weight.shape[1] - 1)
    with without_promotion():
        tokens = torch.cat((before.to(weight.dtype), x.to(weight.dtype)), -1)
    y = _convolved(tokens, weight, bias, activation, x)
    if not return_final_states:
        return y
    final = tokens[..., tokens.shape[-1] - weight.shape[1] + 1 :].to(x.dtype)
    return y, final if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update_ref(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Any = None,
    cache_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `causal_conv1d_update` without a pool of states."""
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    columns, seqlen = conv_state.shape[-1], tokens.shape[-1]
    news = tokens.to(conv_state.dtype)
    if cache_seqlens is None:
        with without_promotion():
            seen = torch.cat((conv_state, news), -1)
        conv_state.copy_(seen[..., seqlen:])
    else:
        taps = weight.shape[1] - 1
        steps = torch.arange(-taps, seqlen, device=x.device)
        positions = (cache_seqlens.long()[:, None, None] + steps) % columns
        before, written = positions.expand(-1, tokens.shape[1], -1).tensor_split([taps], -1)
        with without_promotion():
            seen = torch.cat((conv_state.gather(-1, before), news), -1)
        # Of tokens that share a column the newest stays.
        conv_state.scatter_(-1, written[..., -columns:], news[..., -columns:])
    y = _convolved(seen.to(weight.dtype), weight, bias, activation, tokens)
    return y.view(x.shape)


def causal_conv1d_varlen_states_ref(
    x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int
) -> torch.Tensor:
    """As `causal_conv1d_varlen_states`, sequence by sequence."""
    states = x.new_zeros(len(cu_seqlens) - 1, x.shape[1], state_len)
    for i, (begin, end) in enumerate(pairwise(as_list(cu_seqlens))):
        kept = min(end - begin, state_len)
        # Not through rows that a loop unbinds: autograd refuses to record writes to them.
        states[i, :, state_len - kept :] = x[end - kept : end].T
    return states


def _convolved(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Any,
    x: torch.Tensor,
) -> torch.Tensor:
    """The outputs of the last tokens, as many as x has and in its dtype."""
    if activation is not None and activation not in ACTIVATIONS:
        raise InvalidInputError(
            f"activation must be None, 'silu' or 'swish', found {activation!r}: apply another one "
            "to the output"
        )
    bias = None if bias is None else bias.to(weight.dtype)
    y = functional.conv1d(tokens, weight[:, None], bias, groups=weight.shape[0])
    y = y[..., y.shape[-1] - x.shape[-1] :]
    return (y if activation is None else functional.silu(y)).to(x.dtype)
