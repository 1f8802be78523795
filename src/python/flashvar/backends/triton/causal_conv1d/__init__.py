"""Launches of the Triton kernels of causal_conv1d: fixed configurations, nothing is tuned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.causal_conv1d.kernels import (
    bwd_kernel,
    bwd_state_kernel,
    final_kernel,
    fwd_kernel,
    update_kernel,
)
from flashvar.backends.triton.launch_or_compile import Begin
from flashvar.backends.triton.repeated import on_device, start

if TYPE_CHECKING:
    from flashvar.ops.causal_conv1d.problem import (
        BackwardLaunch,
        Convolution,
        ForwardLaunch,
        Gradients,
        UpdateLaunch,
    )
    from flashvar.selection.candidates import CandidateResult

# Elements of a block: 16 bytes of a 16-bit dtype for each thread of 4 warps.
_ELEMENTS: Final = 128 * 8
_MAX_BLOCK_DIM: Final = 128
# Tokens over which one program sums its part of the gradients of weight and bias.
_CHUNK: Final = 256
# Tokens or columns of a block of an update. Most updates have one token.
_UPDATE_ROWS: Final = 4
_WARPS: Final = 4


def prepare_forward(chosen: CandidateResult, *like: object) -> ForwardLaunch:
    """The launch that writes the output and the final state."""
    return partial(forward, chosen)


def prepare_backward(chosen: CandidateResult, *like: object) -> BackwardLaunch:
    """The launch that writes the gradients."""
    return partial(backward, chosen)


def prepare_update(chosen: CandidateResult, *like: object) -> UpdateLaunch:
    """The launch that writes the output, and moves the tokens of x into the state."""
    return partial(update, chosen)


def forward(
    chosen: CandidateResult | None,
    conv: Convolution,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    final_state: torch.Tensor,
    begin: Begin = start,
) -> None:
    """Write the output, and the final state, which is contiguous."""
    seqlen, dim = conv.x.shape[1:]
    with on_device(y.device.index):  # Triton launches on the current device
        if y.numel():
            sizes = _sizes(dim, conv.x.stride(2) == 1)
            blocks = conv.x.shape[0] * -(-seqlen // sizes["BLOCK_ROWS"])
            begin(fwd_kernel, _grid(blocks, dim, sizes))(
                *(y, conv.x, conv.weight, conv.bias, residual, conv.state, conv.cu_seqlens),
                *(*y.stride(), *conv.x.stride(), *conv.weight.stride(), *_strides(conv.bias, 1)),
                *(*_strides(residual, 3), *_strides(conv.state, 3)),
                *(seqlen, conv.sequences, conv.sequences.bit_length(), dim),
                **_constants(conv),
                **sizes,
            )
        columns = final_state.shape[-1]
        if final_state.numel():
            sizes = _sizes(dim, conv.x.stride(2) == 1)
            blocks = -(-conv.sequences * columns // sizes["BLOCK_ROWS"])
            begin(final_kernel, _grid(blocks, dim, sizes))(
                *(final_state, conv.x, conv.state, conv.cu_seqlens),
                *(*conv.x.stride(), *_strides(conv.state, 3), seqlen, conv.sequences, dim),
                COLUMNS=columns,
                **sizes,
            )


def backward(
    chosen: CandidateResult | None,
    conv: Convolution,
    grad_y: torch.Tensor,
    grad_final: torch.Tensor | None,
    grads: Gradients,
    begin: Begin = start,
) -> None:
    """Write the gradients."""
    batch, seqlen, dim = conv.x.shape
    tensors = (grad_y, grad_final, conv.x, conv.weight, conv.bias, conv.state, conv.cu_seqlens)
    strides = (
        *(*grad_y.stride(), *_strides(grad_final, 3), *conv.x.stride(), *conv.weight.stride()),
        *(*_strides(conv.bias, 1), *_strides(conv.state, 3)),
    )
    constants = {
        **_constants(conv),
        "FINAL_COLUMNS": 0 if grad_final is None else grad_final.shape[-1],
    }
    chunks = batch * -(-seqlen // _CHUNK)
    parts = conv.x.new_empty(chunks, conv.width + 1, dim, dtype=torch.float32)
    with on_device(grad_y.device.index):
        if conv.x.numel():
            sizes = _sizes(dim, conv.x.stride(2) == 1)
            begin(bwd_kernel, _grid(chunks, dim, sizes))(
                *(grads.x, parts, *tensors, *grads.x.stride(), *strides),
                *(seqlen, conv.sequences, conv.sequences.bit_length(), dim),
                **constants,
                CHUNK=_CHUNK,
                **sizes,
            )
        if grads.state is not None and grads.state.numel():
            sizes = _sizes(dim, conv.x.stride(2) == 1)
            blocks = -(-conv.sequences * grads.state.shape[-1] // sizes["BLOCK_ROWS"])
            begin(bwd_state_kernel, _grid(blocks, dim, sizes))(
                *(grads.state, *tensors, *strides, seqlen, conv.sequences, dim),
                **constants,
                **sizes,
            )
    total = parts.sum(0)
    grads.weight.copy_(total[:-1].T)
    if grads.bias is not None:
        grads.bias.copy_(total[-1])


def update(
    chosen: CandidateResult | None,
    conv: Convolution,
    residual: torch.Tensor | None,
    state_indices: torch.Tensor | None,
    state_positions: torch.Tensor | None,
    y: torch.Tensor,
    begin: Begin = start,
) -> None:
    """Write the output, and move the tokens of x into the state."""
    batch, seqlen, dim = conv.x.shape
    pool = conv.state
    assert pool is not None
    sizes = _sizes(dim, True) | {"BLOCK_ROWS": _UPDATE_ROWS}
    with on_device(y.device.index):
        begin(update_kernel, _grid(batch, dim, sizes))(
            *(y, conv.x, conv.weight, conv.bias, residual, pool, state_indices, state_positions),
            *(*y.stride(), *conv.x.stride(), *conv.weight.stride(), *_strides(conv.bias, 1)),
            *(*_strides(residual, 3), *pool.stride(), seqlen, pool.shape[0], dim),
            **_constants(conv),
            **sizes,
        )


def _grid(blocks: int, dim: int, sizes: dict[str, Any]) -> tuple[int]:
    return (blocks * -(-dim // sizes["BLOCK_DIM"]),)


def _strides(tensor: torch.Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()


def _constants(conv: Convolution) -> dict[str, Any]:
    return {
        "COLUMNS": 0 if conv.state is None else conv.state.shape[-1],
        "WIDTH": conv.width,
        "SILU": conv.silu,
    }


def _sizes(dim: int, channels_contiguous: bool) -> dict[str, Any]:
    """The block and the options of a kernel. Blocks are wider where channels are contiguous."""
    most = _MAX_BLOCK_DIM if channels_contiguous else _ELEMENTS // _MAX_BLOCK_DIM
    columns = min(max(power_of_2(dim), 8), most)
    return {
        "BLOCK_ROWS": _ELEMENTS // columns,
        "BLOCK_DIM": columns,
        "num_warps": _WARPS,
        "enable_fp_fusion": True,
    }
