"""Launches the chunked kernels, forward and backward.

The scratch memory of the backward is, for each chunk and head of v, two states and eight squares
[chunk, chunk] in the dtype of operands, and two blocks of the size of the chunk's v in float32.
With bfloat16 and K = V = 128 that is 3 KiB for each token and head of v.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton.language as tl

from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.gated_delta_rule.backward import (
    reverse_kernel,
    rows_kernel,
    squares_kernel,
)
from flashvar.backends.triton.gated_delta_rule.chunked import chain_kernel, chunk_kernel
from flashvar.backends.triton.launch_or_compile import Begin
from flashvar.backends.triton.repeated import on_device, start
from flashvar.ops.gated_delta_rule.problem import L2NORM_EPS, Gradients, Inputs

MIN_CHUNK_TOKENS: Final = 16
# Upper bounds of a chunk's tokens and of the bytes of its q or k: several such blocks fit into
# 99 KiB of shared memory.
_MAX_CHUNK_TOKENS: Final = 64
_CHUNK_BYTES: Final = 16384
# Upper bounds of the elements and of the columns of a state in a program.
_STATE_ELEMENTS: Final = 8192
_STATE_COLUMNS: Final = 64
_WARPS: Final = 4
_BACKWARD_WARPS: Final = 8
# Dtypes of operands. float16 lacks the range of states and gradients: those calls use float32.
_OPERANDS: Final = {torch.bfloat16: (torch.bfloat16, tl.bfloat16)}
_FLOAT32: Final = (torch.float32, tl.float32)


def chunk_tokens(q: torch.Tensor) -> int:
    """How many tokens a chunk has."""
    dtype, _ = _OPERANDS.get(q.dtype, _FLOAT32)
    row_bytes: int = _block_k(q) * dtype.itemsize
    return min(_CHUNK_BYTES // row_bytes, _MAX_CHUNK_TOKENS)


def _block_k(q: torch.Tensor) -> int:
    return max(power_of_2(q.shape[-1]), 16)


class Chunks:
    """The division of a call into chunks, and the arguments that its kernels share."""

    def __init__(self, inputs: Inputs) -> None:
        q, v = inputs.q, inputs.v.shape[-1]
        k = q.shape[-1]
        self.inputs = inputs
        self.seqlen: int = q.shape[1]
        self.heads, self.sequences = inputs.heads, inputs.sequences
        self.dtype, operand = _OPERANDS.get(q.dtype, _FLOAT32)
        block_k = _block_k(q)
        self.size = chunk_tokens(q)
        self.constants: dict[str, Any] = {
            **{"heads": self.heads, "group": inputs.group, "K": k, "CHUNK": self.size},
            **{"BLOCK_K": block_k, "OPERAND": operand},
            # With float32 there is no shared memory left to load the next iteration ahead.
            "num_stages": 2 if self.dtype.itemsize == 2 else 1,
            "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        }
        block_v = min(max(power_of_2(v), 16), _STATE_COLUMNS)
        block_v = min(block_v, _STATE_ELEMENTS // block_k)
        self.values: dict[str, int] = {"V": v, "BLOCK_V": block_v}
        # One iteration over columns holds more at a time than each of two: 117 KiB with K 128.
        one_is_large = v <= block_v and block_v * block_k == _STATE_ELEMENTS
        self.values_of_rows = {"V": v, "BLOCK_V": block_v // 2 if one_is_large else block_v}
        self.norm = {"L2NORM": inputs.qk_l2norm, "EPS": L2NORM_EPS}
        self.beta = {
            "SIGMOID": inputs.beta_sigmoid,
            "BETA_SCALE": 2.0 if inputs.allow_neg_eigval else 1.0,
        }

    @property
    def slots(self) -> int:
        """An upper bound of the number of chunks."""
        if self.inputs.cu_seqlens is None:
            return self.sequences * -(-self.seqlen // self.size)
        return self.seqlen // self.size + self.sequences if self.sequences else 0

    @property
    def chains(self) -> tuple[int]:
        """The grid of kernels that iterate over sequences: column blocks of all states."""
        return (self.sequences * self.heads * -(-self.values["V"] // self.values["BLOCK_V"]),)

    @property
    def search_arguments(self) -> tuple[int, int, int]:
        """The arguments by which kernels find the sequence of a slot: see sequence_of()."""
        steps = self.sequences - 1
        return self.seqlen, self.sequences, 1 << steps.bit_length() - 1 if steps > 0 else 0

    def scratch(self, *shape: int) -> torch.Tensor:
        """Scratch memory [slots, heads, *shape] in the dtype of operands."""
        device = self.inputs.q.device
        return torch.empty(self.slots, self.heads, *shape, dtype=self.dtype, device=device)

    def floats(self, *shape: int) -> torch.Tensor:
        """Scratch memory [slots, heads, *shape] in float32."""
        device = self.inputs.q.device
        return torch.empty(self.slots, self.heads, *shape, dtype=torch.float32, device=device)


def strides(x: torch.Tensor | None, dimensions: int) -> tuple[int, ...]:
    """The strides of a tensor; zeros if it is None."""
    return (0,) * dimensions if x is None else x.stride()


def forward(
    inputs: Inputs,
    before: torch.Tensor | None,
    out: torch.Tensor,
    after: torch.Tensor,
    begin: Begin = start,
) -> None:
    """Write out, and the state after each sequence."""
    chunks = Chunks(inputs)
    with on_device(out.device.index):  # Triton launches on the current device
        found = _parts(chunks, begin)
        _chain(chunks, found, before, (after, out, None, None), begin)


def backward(
    inputs: Inputs,
    before: torch.Tensor | None,
    grad_out: torch.Tensor | None,
    grad_after: torch.Tensor | None,
    begin: Begin = start,
) -> Gradients:
    """The gradients of all inputs."""
    chunks = Chunks(inputs)
    (q, k, v), heads, size = inputs[:3], inputs.heads, chunks.size
    grad_out = torch.zeros_like(v) if grad_out is None else grad_out
    # Varlen: rows of no sequence have gradients of 0.
    make = torch.empty if inputs.cu_seqlens is None else torch.zeros
    d_q, d_k = (make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    d_beta = make(v.shape[:3], dtype=inputs.beta.dtype, device=q.device)
    d_g = None if inputs.g is None else make(v.shape[:3], dtype=inputs.g.dtype, device=q.device)
    d_v = make(v.shape, dtype=chunks.dtype, device=q.device)
    d_before = None
    if before is not None:
        d_before = torch.empty(before.shape, dtype=torch.float32, device=q.device)
    states = chunks.scratch(q.shape[-1], v.shape[-1])
    updates = chunks.floats(size, v.shape[-1])
    d_states, d_updates = torch.empty_like(states), torch.empty_like(updates)
    d_scores, d_gram = chunks.scratch(2, size, size), chunks.scratch(2, size, size)
    d_sums, predicted_sums = chunks.floats(size), chunks.floats(size)
    parts = [None if x is None else chunks.floats().zero_() for x in (inputs.a_log, inputs.dt_bias)]
    qk_strides = (*q.stride(), *k.stride())
    grad_out_strides = strides(grad_out, 4)
    cu_seqlens_strides = strides(inputs.cu_seqlens, 1)
    with on_device(q.device.index):
        found = _parts(chunks, begin)
        _chain(chunks, found, before, (None, None, states, updates), begin)
        if chunks.chains[0]:
            begin(reverse_kernel, chunks.chains)(
                *(q, k, inputs.cu_seqlens, *found),
                *(grad_out, grad_after, d_before, d_states, d_updates, d_v),
                *(*qk_strides, *cu_seqlens_strides, *grad_out_strides, *strides(grad_after, 4)),
                chunks.seqlen,
                **chunks.values,
                **chunks.constants,
                num_warps=_BACKWARD_WARPS,
                enable_fp_fusion=True,
            )
        if chunks.slots * heads:
            begin(squares_kernel, (chunks.slots * heads,))(
                *(k, v, inputs.cu_seqlens, *found, states, updates),
                *(grad_out, d_updates, d_v, d_scores, d_gram, d_sums, predicted_sums, d_beta),
                *(
                    *k.stride(),
                    *v.stride(),
                    *cu_seqlens_strides,
                    *grad_out_strides,
                    *chunks.search_arguments,
                ),
                **chunks.beta,
                **chunks.values,
                **chunks.constants,
                num_warps=_BACKWARD_WARPS,
                enable_fp_fusion=True,
            )
            begin(rows_kernel, (chunks.slots * q.shape[2],))(
                *(q, k, inputs.g, inputs.a_log, inputs.dt_bias, inputs.cu_seqlens, found[2]),
                *(
                    states,
                    updates,
                    grad_out,
                    d_states,
                    d_v,
                    d_scores,
                    d_gram,
                    d_sums,
                    predicted_sums,
                ),
                *(d_q, d_k, d_g, *parts),
                *(*qk_strides, *strides(inputs.g, 3)),
                *(
                    *strides(inputs.a_log, 1),
                    *strides(inputs.dt_bias, 1),
                    *cu_seqlens_strides,
                    *grad_out_strides,
                ),
                *chunks.search_arguments,
                **chunks.norm,
                **chunks.values_of_rows,
                **chunks.constants,
                num_warps=_BACKWARD_WARPS,
                enable_fp_fusion=True,
            )
    d_a_log, d_dt_bias = (
        None if part is None or x is None else part.sum(0).to(x.dtype)
        for part, x in zip(parts, (inputs.a_log, inputs.dt_bias), strict=True)
    )
    return Gradients(d_q, d_k, d_v.to(v.dtype), d_g, d_beta, d_a_log, d_dt_bias, d_before)


# T D and P of each slot and head, and the values of rows (chunks.py).
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _parts(chunks: Chunks, begin: Begin) -> _Parts:
    """Compute the matrices that do not depend on states."""
    inputs, size = chunks.inputs, chunks.size
    squares = chunks.scratch(2, size, size), chunks.scratch(2, size, size)
    found = *squares, chunks.floats(4, size)
    if chunks.slots * chunks.heads:
        begin(chunk_kernel, (chunks.slots * chunks.heads,))(
            *(inputs.q, inputs.k, *inputs[3:8], *found),
            *(*inputs.q.stride(), *inputs.k.stride()),
            *(*strides(inputs.g, 3), *inputs.beta.stride()),
            *(*strides(inputs.a_log, 1), *strides(inputs.dt_bias, 1)),
            *(*strides(inputs.cu_seqlens, 1), *chunks.search_arguments, inputs.scale),
            **chunks.beta,
            **chunks.norm,
            **chunks.constants,
            num_warps=_WARPS,
            enable_fp_fusion=True,
        )
    return found


def _chain(
    chunks: Chunks,
    found: _Parts,
    before: torch.Tensor | None,
    written: tuple[torch.Tensor | None, ...],
    begin: Begin,
) -> None:
    """Iterate over the chunks of each sequence, from the first to the last."""
    inputs = chunks.inputs
    q, k, v = inputs[:3]
    if chunks.chains[0] == 0:
        return
    begin(chain_kernel, chunks.chains)(
        *(q, k, v, inputs.cu_seqlens, *found, before, *written),
        *(*q.stride(), *k.stride(), *v.stride(), *strides(inputs.cu_seqlens, 1)),
        *(*strides(before, 4), *strides(written[0], 4), *strides(written[1], 4)[:3]),
        chunks.seqlen,
        **chunks.values,
        **chunks.constants,
        num_warps=_WARPS,
        enable_fp_fusion=True,
    )
