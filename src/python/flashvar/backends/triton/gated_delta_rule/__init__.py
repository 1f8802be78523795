"""Launches of the Triton kernels of gated_delta_rule: one fixed configuration, nothing is tuned."""

from __future__ import annotations

from typing import Final

import torch
import triton

from flashvar.backends.triton.gated_delta_rule.chunked import chain_kernel, inverse_kernel
from flashvar.backends.triton.gated_delta_rule.recurrent import recurrent_kernel
from flashvar.ops.gated_delta_rule.problem import L2NORM_EPS, Inputs

# Elements of a state in a program: 32 registers for each thread of 4 warps.
_ELEMENTS: Final = 4096
_WARPS: Final = 4
_MOST_COLUMNS: Final = 64
# Sequences of fewer tokens, on average where they are packed, go token by token.
_FEW: Final = 32
# Tokens of a chunk, and bytes of its q or k: several such fit into 99 KiB of shared memory.
_MOST_TOKENS: Final = 64
_LEAST_TOKENS: Final = 16
_CHUNK_BYTES: Final = 16384
# Elements of a state in a program of the chunked kernel.
_CHUNKED_ELEMENTS: Final = 8192


def forward(
    inputs: Inputs,
    initial_state: torch.Tensor | None,
    out: torch.Tensor,
    final_state: torch.Tensor,
) -> None:
    """Write out, and the state after each sequence."""
    rows = inputs.q.shape[0] * inputs.q.shape[1]
    block_k = max(triton.next_power_of_2(inputs.q.shape[-1]), 16)
    chunk = min(_CHUNK_BYTES // (block_k * inputs.q.element_size()), _MOST_TOKENS)
    if rows < _FEW * inputs.sequences or chunk < _LEAST_TOKENS:
        _recurrent(inputs, initial_state, None, final_state, out)
    else:
        _chunked(inputs, initial_state, final_state, out, block_k, chunk)


def update(inputs: Inputs, pool: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """As forward, on states pool[indices] in place; a negative index is no state at all."""
    _recurrent(inputs, pool, indices, pool, out)


def _recurrent(
    inputs: Inputs,
    before: torch.Tensor | None,
    indices: torch.Tensor | None,
    after: torch.Tensor,
    out: torch.Tensor,
) -> None:
    k, v = inputs.q.shape[-1], inputs.v.shape[-1]
    block_k = triton.next_power_of_2(k)
    block_v = min(triton.next_power_of_2(v), _MOST_COLUMNS, max(_ELEMENTS // block_k, 1))
    programs = inputs.sequences * inputs.heads * -(-v // block_v)
    if programs == 0:
        return
    strides = (
        *(n for x in (inputs.q, inputs.k, inputs.v) for n in x.stride()),
        *_strides(inputs.g, 3),
        *inputs.beta.stride(),
        *(n for x in (inputs.a_log, inputs.dt_bias, inputs.cu_seqlens) for n in _strides(x, 1)),
        *_strides(indices, 1),
        *_strides(before, 4),
        *after.stride(),
        *out.stride()[:3],
    )
    with torch.cuda.device_of(out):  # Triton launches on the current device
        recurrent_kernel[(programs,)](
            *inputs[:8],
            *(indices, before, after, out),
            *strides,
            *(inputs.q.shape[1], after.shape[0], inputs.scale),
            HEADS=inputs.heads,
            GROUP=inputs.group,
            K=k,
            V=v,
            L2NORM=inputs.qk_l2norm,
            SIGMOID=inputs.beta_sigmoid,
            BETA_SCALE=2.0 if inputs.allow_neg_eigval else 1.0,
            EPS=L2NORM_EPS,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=_WARPS,
        )


def _chunked(
    inputs: Inputs,
    before: torch.Tensor | None,
    after: torch.Tensor,
    out: torch.Tensor,
    block_k: int,
    chunk: int,
) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    seqlen, heads, sequences = q.shape[1], inputs.heads, inputs.sequences
    block_v = max(triton.next_power_of_2(v.shape[-1]), 16)
    block_v = min(block_v, _MOST_COLUMNS, _CHUNKED_ELEMENTS // block_k)
    programs = sequences * heads * -(-v.shape[-1] // block_v)
    if programs == 0:
        return
    dense = inputs.cu_seqlens is None
    slots = sequences * -(-seqlen // chunk) if dense else seqlen // chunk + sequences
    inverse = torch.empty(slots, heads, chunk, chunk, dtype=torch.float32, device=q.device)
    sums, betas = torch.empty(2, slots, heads, chunk, dtype=torch.float32, device=q.device)
    of_both = {
        **{"HEADS": heads, "GROUP": inputs.group, "K": q.shape[-1], "L2NORM": inputs.qk_l2norm},
        **{"EPS": L2NORM_EPS, "CHUNK": chunk, "BLOCK_K": block_k, "num_warps": _WARPS},
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "num_stages": 1,
    }
    with torch.cuda.device_of(out):  # Triton launches on the current device
        inverse_kernel[(slots * heads,)](
            *inputs[1:2],
            *inputs[3:8],
            *(inverse, sums, betas),
            *(*k.stride(), *_strides(inputs.g, 3), *inputs.beta.stride()),
            *(*_strides(inputs.a_log, 1), *_strides(inputs.dt_bias, 1)),
            *_strides(inputs.cu_seqlens, 1),
            *(seqlen, sequences, 1 << (sequences - 1).bit_length() - 1 if sequences > 1 else 0),
            SIGMOID=inputs.beta_sigmoid,
            BETA_SCALE=2.0 if inputs.allow_neg_eigval else 1.0,
            **of_both,
        )
        chain_kernel[(programs,)](
            *(q, k, v, inputs.cu_seqlens, inverse, sums, betas, before, after, out),
            *(*q.stride(), *k.stride(), *v.stride(), *_strides(inputs.cu_seqlens, 1)),
            *(*_strides(before, 4), *after.stride(), *out.stride()[:3]),
            *(seqlen, inputs.scale),
            V=v.shape[-1],
            BLOCK_V=block_v,
            **of_both,
        )


def _strides(x: torch.Tensor | None, dimensions: int) -> tuple[int, ...]:
    return (0,) * dimensions if x is None else x.stride()
