"""The module `flash_attn.flash_attn_interface`: public functions, and functions below autograd.

Functions below autograd are for code that has its own autograd function, such as context
parallelism: autograd does not record them, and the backward writes into given tensors.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

import torch

from flashvar.compat.not_provided import refuse_name
from flashvar.errors import BackendUnavailableError
from flashvar.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flashvar.ops.arguments import as_integer
from flashvar.ops.attention.cache import read
from flashvar.ops.attention.call import draw_rng_state
from flashvar.ops.attention.dropout_mask import block_of_keys, signed_probabilities
from flashvar.ops.attention.options import plain_number, window_side
from flashvar.ops.attention.problem import Inputs, Options
from flashvar.ops.attention.validate import rows_contiguous

__all__ = [
    "USE_TRITON_ROCM",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
]

# Whether FlashAttention would use its Triton kernels for AMD GPUs.
USE_TRITON_ROCM = False

# Out, log-sum-exp, the dropped weights or an empty tensor, and the state of the dropout mask.
Forward: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_ROUNDED_TO = 128


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> Forward:
    """The forward of `flash_attn_func`."""
    options = _options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    return _forward(_inputs(q, k, v, alibi_slopes=alibi_slopes), options, return_softmax)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Forward:
    """The forward of `flash_attn_varlen_func`; `zero_tensors` has no effect."""
    if num_splits > 1:
        raise BackendUnavailableError(
            f"num_splits > 1 is not supported by packed sequences, found {num_splits}: leave it out"
        )
    longest = as_integer(max_seqlen_k)
    options = _options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )._replace(max_seqlen_q=as_integer(max_seqlen_q), max_seqlen_k=longest)
    offsets: torch.Tensor | None = cu_seqlens_k
    if block_table is not None or leftpad_k is not None:
        pads = {"block_table": block_table, "leftpad_k": leftpad_k}
        k, v, seqused_k = read(k, v, cu_seqlens_k, longest, **pads, seqused_k=seqused_k)
        offsets = None
    inputs = _inputs(
        q,
        k,
        v,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=offsets,
        seqused_k=seqused_k,
    )
    return _forward(inputs, options, return_softmax)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write dq, dk and dv; returns delta, [batch, heads, seqlen_q rounded up to 128]."""
    options = _options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )._replace(deterministic=deterministic)
    inputs = _inputs(q, k, v, alibi_slopes=alibi_slopes, rng_state=rng_state)
    _backward(inputs, options, dout, out, softmax_lse, (dq, dk, dv))
    sums = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    return torch.nn.functional.pad(sums, (0, -sums.shape[-1] % _ROUNDED_TO))


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Write dq, dk and dv; returns delta, [heads, total + 128 * batch]."""
    options = _options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )._replace(
        deterministic=deterministic,
        max_seqlen_q=as_integer(max_seqlen_q),
        max_seqlen_k=as_integer(max_seqlen_k),
    )
    inputs = _inputs(
        q,
        k,
        v,
        alibi_slopes=alibi_slopes,
        rng_state=rng_state,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    _backward(inputs, options, dout, out, softmax_lse, (dq, dk, dv))
    sums = (dout.float() * out.float()).sum(-1).transpose(0, 1)
    return torch.nn.functional.pad(sums, (0, _ROUNDED_TO * (cu_seqlens_q.shape[0] - 1)))


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
) -> Options:
    return Options(
        causal=bool(causal),
        scale=plain_number(softmax_scale),
        window_left=window_side(window_left),
        window_right=window_side(window_right),
        softcap=softcap,
        dropout_p=dropout_p,
    )


def _inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **optional: torch.Tensor | None
) -> Inputs:
    return Inputs(rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), **optional)


def _forward(inputs: Inputs, options: Options, return_softmax: bool) -> Forward:
    if options.dropout_p > 0:
        inputs = inputs._replace(rng_state=draw_rng_state(inputs.q))
    with torch.no_grad():
        out, lse = torch.ops.flashvar.attention_fwd.default(*inputs, *options)
    weights = out.new_empty(0)
    if return_softmax and options.dropout_p > 0:
        weights = signed_probabilities(inputs, options)
    state = inputs.rng_state
    if state is None:
        state = torch.zeros(2, dtype=torch.int64, device=out.device)
    return out, lse, weights, state


def _backward(
    inputs: Inputs,
    options: Options,
    dout: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    targets: tuple[torch.Tensor | None, ...],
) -> None:
    if options.dropout_p == 0:
        inputs = inputs._replace(rng_state=None)
    with torch.no_grad():
        grads = torch.ops.flashvar.attention_bwd.default(
            dout, None, out, softmax_lse, False, False, *inputs, *options
        )
        # The last gradients are those of bias and sinks, which these functions do not have.
        for grad, target in zip(grads[:3], targets, strict=True):
            if target is not None:
                target.copy_(grad)


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, copied if its last dimension is strided."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def _get_block_size_n(
    device: torch.device | int | str, head_dim: int, is_dropout: bool, is_causal: bool
) -> int:
    """How many keys share a running maximum in the weights of `return_attn_probs`."""
    return block_of_keys(head_dim, torch.device(device))


def __getattr__(name: str) -> NoReturn:
    """Raise; for names of FlashAttention the error suggests what to use instead."""
    refuse_name(__name__, name)
