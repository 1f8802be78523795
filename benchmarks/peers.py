"""Kernels of packages that torch does not bring, where they are installed.

Each raises ImportError where its package is missing, and ValueError for what it does not run:
the run records that as the reason why it is absent. The calls follow the packages' documentation:
flash-attn 2.8, flash-attn-4 4.0.0b36, flashinfer-python 0.7, xformers 0.0.35, sageattention 1.0;
FlashAttention 3 as built into vllm 0.33.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
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


def flash_attn_3(cell: Cell, device: torch.device) -> Forward:
    """FlashAttention 3, of the library in vllm's wheel: a forward of packed sequences alone."""
    if cell.direction == "backward":
        raise ValueError("vllm's build has no backward")
    _load_flash_attn_3()
    offsets, offsets_k = (_all_bounds(cell, rows, device) for rows in (cell.seqlen, cell.keys))
    no = None  # of what the call does not use: caches, pages, rotary tables, scales, sinks

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        packed = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (q, k, v))
        result = torch.ops._vllm_fa3_C.fwd(
            *packed,
            *(no, no, no, no),
            *(offsets, offsets_k, no, no, no),
            *(cell.seqlen, cell.keys),
            *(no,) * 9,
            *(q.shape[-1] ** -0.5, cell.causal, -1, -1, 0.0, True),
            *(no, 1, no, 0, no, 1, 0, no),
        )
        return _first(result).view(*q.shape[:-1], v.shape[-1])

    return forward


@cache
def _load_flash_attn_3() -> None:
    try:
        path = distribution("vllm").locate_file("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    except PackageNotFoundError:
        raise ImportError("vllm is not installed") from None
    torch.ops.load_library(str(path))


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
    offsets, offsets_k = (_all_bounds(cell, rows, device) for rows in (cell.seqlen, cell.keys))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[cell.dtype]
    heads = (cell.heads, cell.heads_kv, cell.head_dim)
    wrapper.plan(offsets, offsets_k, *heads, causal=cell.causal, q_data_type=dtype)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        packed = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (q, k, v))
        out: torch.Tensor = wrapper.run(*packed)
        return out.view_as(q)

    return forward


def xformers(cell: Cell, device: torch.device) -> Forward:
    """xformers with the kernel that it chooses: FlashAttention 3 where its package is installed.

    Its wheel on PyPI needs libcudart.so.12, beside a torch for CUDA 13 too: without it xformers
    warns while it is loaded, and refuses every call.
    """
    group = cell.heads // cell.heads_kv
    if group > 1 and cell.direction == "backward":
        raise ValueError("grouped heads have no backward")
    with _foreign_flash_attn_hidden():
        module = _installed("xformers", "xformers.ops")
    mask = module.LowerTriangularMask() if cell.causal else None
    if cell.lengths:
        mask = module.fmha.BlockDiagonalMask.from_seqlens(cell.lengths, device=device)
        mask = mask.make_causal() if cell.causal else mask

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given = (q, k, v)
        if group > 1:
            k, v = (one.unsqueeze(-2).expand(*one.shape[:-1], group, -1) for one in (k, v))
            given = (q.unflatten(-2, (cell.heads_kv, group)), k, v)
        if cell.lengths:
            given = tuple(one.unsqueeze(0) for one in given)
        out: torch.Tensor = module.memory_efficient_attention(*given, attn_bias=mask)
        return out.view_as(q)

    return forward


@contextmanager
def _foreign_flash_attn_hidden() -> Iterator[None]:
    """Hides flash_attn while xformers is loaded, unless that is flash-attn's.

    xformers takes every flash_attn for it, so it does not load beside flash-attn-4 alone.
    """
    name = "flash_attn"
    if _is_installed("flash-attn"):
        yield
        return
    others = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if others is not None:
            sys.modules[name] = others


def sageattention(cell: Cell, device: torch.device) -> Forward:
    """SageAttention 1, which rounds q and k to 8 bits: approximate, and a forward alone."""
    if cell.direction == "backward":
        raise ValueError("it has no backward")
    module = _installed("sageattention", "sageattention")
    if (found := version("sageattention")).partition(".")[0] != "1":
        raise ValueError(f"expected version 1, whose rounding the tables tell, found {found}")
    offsets = bounds(cell, device) if cell.lengths else None
    keys: list[torch.Tensor] = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # It writes to k, which others read too: its own copy is made in the first call, which is
        # not timed.
        if not keys:
            keys.append(k.clone())
        out: torch.Tensor
        if offsets is None:
            out = module.sageattn(q, keys[0], v, tensor_layout="NHD", is_causal=cell.causal)
        else:
            sizes = (offsets, offsets, cell.seqlen, cell.seqlen)
            out = module.sageattn_varlen(q, keys[0], v, *sizes, is_causal=cell.causal)
        return out

    return forward


def _all_bounds(cell: Cell, rows: int, device: torch.device) -> torch.Tensor:
    """`bounds`, of dense sequences too: for contenders that take nothing but packed sequences."""
    if cell.lengths:
        return bounds(cell, device)
    return torch.arange(0, (cell.batch + 1) * rows, rows, dtype=torch.int32, device=device)


def _installed(package: str, module: str) -> Any:
    """The module of a distribution; what stands in for it under the same name does not count.

    Raises:
        ImportError: it is not installed.
    """
    if not _is_installed(package):
        raise ImportError(f"{package} is not installed")
    return import_module(module)


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _first(result: Any) -> torch.Tensor:
    """Out; some versions give the log-sum-exp with it."""
    out: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
    return out
