"""Contenders: flashvar's backends and torch's own kernels, called alike.

A contender makes one call from a cell and its tensors. Backwards are all timed through autograd on
a graph that is kept, so each pays the same way for it. `peers.py` has those of other packages,
`contenders.py` the names of all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import Cell
from flashvar.ops.dtypes import dtype_of

Tensors: TypeAlias = tuple[torch.Tensor, ...]
# Enqueues the work; gives out, or the gradients of q, k and v, in the shapes of q, k and v.
Call: TypeAlias = Callable[[], Tensors]
# Out for q, k and v as [batch, seqlen, heads, head_dim] or packed [tokens, heads, head_dim].
Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# Makes the forward of a cell; raises where the contender cannot run it.
Make: TypeAlias = Callable[[Cell, torch.device], Forward]

_SEED: Final = 20
_DROPOUT: Final = 0.1


@dataclass(frozen=True)
class Contender:
    """One way to compute attention; both of its directions are called inside of `around`."""

    make: Make
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    features: frozenset[str] = frozenset()  # that it is timed with


def inputs(cell: Cell, device: torch.device) -> tuple[Tensors, torch.Tensor]:
    """Random q, k and v of a cell, the same in every run, and the gradient that flows in."""
    generator = torch.Generator(device).manual_seed(_SEED)

    def normal(heads: int, length: int) -> torch.Tensor:
        rows = (sum(cell.lengths),) if cell.lengths else (cell.batch, length)
        shape = (*rows, heads, cell.head_dim)
        return torch.randn(shape, dtype=dtype_of(cell.dtype), device=device, generator=generator)

    q = normal(cell.heads, cell.seqlen)
    k, v = (normal(cell.heads_kv, cell.keys) for _ in range(2))
    return (q, k, v), normal(cell.heads, cell.seqlen)


def prepare(contender: Contender, cell: Cell, tensors: Tensors, grad_out: torch.Tensor) -> Call:
    """One call of a contender in the cell's direction."""
    if cell.feature is not None and cell.feature not in contender.features:
        raise ValueError(f"is not timed with {cell.feature}")
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with contender.around():
        forward = contender.make(cell, grad_out.device)
        out = forward(*leaves) if cell.direction == "backward" else None

    def call() -> Tensors:
        with contender.around():
            if out is None:
                return (forward(*tensors),)
            grads: Tensors = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
            return grads

    return call


def flashvar(backend: Literal["cuda", "triton", "reference"]) -> Make:
    """`flashvar.attention` with one backend named, so that nothing else can answer."""

    def make(cell: Cell, device: torch.device) -> Forward:
        from flashvar import attention, attention_varlen

        if not cell.lengths:
            extra = _FEATURES[cell.feature](cell, device) if cell.feature is not None else {}
            return lambda q, k, v: attention(q, k, v, causal=cell.causal, backend=backend, **extra)
        offsets = bounds(cell, device)
        return lambda q, k, v: attention_varlen(
            *(q, k, v),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=cell.seqlen,
            max_seqlen_k=cell.seqlen,
            causal=cell.causal,
            backend=backend,
        )

    return make


# What flashvar.attention is given for a feature.
_FEATURES: Final[dict[str, Callable[[Cell, torch.device], dict[str, Any]]]] = {
    "softcap": lambda cell, device: {"softcap": 30.0},
    "alibi": lambda cell, device: {"alibi_slopes": torch.rand(cell.heads, device=device)},
    "dropout": lambda cell, device: {"dropout_p": _DROPOUT},
    "bias": lambda cell, device: {
        "bias": torch.randn(
            *(1, 1, cell.seqlen, cell.seqlen), dtype=dtype_of(cell.dtype), device=device
        )
    },
    "deterministic": lambda cell, device: {"deterministic": True},
}
FEATURES: Final = frozenset(_FEATURES)


def heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """The same memory seen as [batch, heads, seqlen, head_dim], as torch's functions read it."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def sdpa(backend: SDPBackend) -> Make:
    """`scaled_dot_product_attention` held to one backend; packed, torch's `varlen_attn` (FA2)."""

    def make(cell: Cell, device: torch.device) -> Forward:
        if cell.lengths:
            if backend is not SDPBackend.FLASH_ATTENTION:
                raise ValueError("packed sequences run through FlashAttention-2 alone")
            return _varlen_attn(cell, device)
        grouped = cell.heads_kv != cell.heads
        dropout = _DROPOUT if cell.feature == "dropout" else 0.0

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(
                    *heads_first(q, k, v), None, dropout, cell.causal, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        return forward

    return make


def _varlen_attn(cell: Cell, device: torch.device) -> Forward:
    from torch.nn.attention.varlen import varlen_attn

    offsets = bounds(cell, device)
    mask: dict[str, object] = {"window_size": (-1, 0) if cell.causal else (-1, -1)}
    if "window_size" not in signature(varlen_attn).parameters:  # before torch 2.11
        mask = {"is_causal": cell.causal}
    return lambda q, k, v: varlen_attn(q, k, v, offsets, offsets, cell.seqlen, cell.seqlen, **mask)


def flex(cell: Cell, device: torch.device) -> Forward:
    """Compiled `flex_attention`; the block mask is made once and not timed."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if cell.lengths:
        raise ValueError("packed sequences are not timed with it")
    # A backward may give up its buffers only where it runs once.
    torch._functorch.config.donated_buffer = False
    # Each cell is compiled for its own shape, and a process may hold all of them.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if cell.causal:
        length = cell.seqlen
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=str(device)
        )
    grouped = cell.heads_kv != cell.heads

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compiled(*heads_first(q, k, v), block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return forward


def bounds(cell: Cell, device: torch.device) -> torch.Tensor:
    """Where the packed sequences of a cell begin and end, int32 [sequences + 1]."""
    edges = list(accumulate(cell.lengths, initial=0))
    return torch.tensor(edges, dtype=torch.int32, device=device)
