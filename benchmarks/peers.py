"""Kernels of packages that torch does not bring, where they are installed.

Each raises ImportError where its package is missing, and ValueError for what it does not serve:
the run records that as the reason why it is absent. The calls follow the packages' documentation:
flash-attn 2.8, flash-attn-4 4.0.0b36, flashinfer-python 0.7.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from benchmarks.cases import Cell
from benchmarks.contender import Forward, bounds

_WORKSPACE: Final = 128 << 20  # bytes, what FlashInfer's documentation recommends


def flash_attn(cell: Cell, device: torch.device) -> Forward:
    """FlashAttention 2's own package."""
    module = _installed("flash-attn", "flash_attn")
    if not cell.lengths:
        return lambda q, k, v: _first(module.flash_attn_func(q, k, v, causal=cell.causal))
    offsets = bounds(cell, device)
    sizes = (offsets, offsets, cell.seqlen, cell.seqlen)
    return lambda q, k, v: _first(
        module.flash_attn_varlen_func(q, k, v, *sizes, causal=cell.causal)
    )


def flash_attn_4(cell: Cell, device: torch.device) -> Forward:
    """FlashAttention 4, compiled at the first call."""
    module = _installed("flash-attn-4", "flash_attn.cute")
    if not cell.lengths:
        return lambda q, k, v: _first(module.flash_attn_func(q, k, v, causal=cell.causal))
    offsets = bounds(cell, device)
    return lambda q, k, v: _first(
        module.flash_attn_varlen_func(
            *(q, k, v),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=cell.seqlen,
            max_seqlen_k=cell.seqlen,
            causal=cell.causal,
        )
    )


def flashinfer(cell: Cell, device: torch.device) -> Forward:
    """FlashInfer's prefill of packed sequences, planned outside of the clock: a forward alone."""
    if cell.direction == "backward":
        raise ValueError("it has no backward")
    module = _installed("flashinfer-python", "flashinfer")
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    if cell.lengths:
        offsets = bounds(cell, device)
    else:
        step = cell.seqlen
        offsets = torch.arange(0, (cell.batch + 1) * step, step, dtype=torch.int32, device=device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[cell.dtype]
    heads = (cell.heads, cell.heads_kv, cell.head_dim)
    wrapper.plan(offsets, offsets, *heads, causal=cell.causal, q_data_type=dtype)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        packed = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (q, k, v))
        out: torch.Tensor = wrapper.run(*packed)
        return out.view_as(q)

    return forward


def _installed(distribution: str, module: str) -> Any:
    """The module of a distribution; what stands in for it under the same name does not count.

    Raises:
        ImportError: it is not installed.
    """
    try:
        version(distribution)
    except PackageNotFoundError:
        raise ImportError(f"{distribution} is not installed") from None
    return import_module(module)


def _first(result: Any) -> torch.Tensor:
    """Out; some versions give the log-sum-exp with it."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out
