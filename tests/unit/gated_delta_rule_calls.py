"""Arguments of calls of the gated delta rule."""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, Any]


def made(
    batch: int = 2,
    seqlen: int = 70,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (8, 6),
    dtype: torch.dtype = torch.float64,
    packed: tuple[int, ...] | None = None,
    raw: bool = False,
    state: bool = True,
) -> Tensors:
    """Keys of length 1 unless `raw`, with everything that is fused then."""
    if packed is not None:
        batch, seqlen = 1, sum(packed)
    wide = torch.promote_types(dtype, torch.float32)
    few, many = heads
    given: Tensors = {
        "q": torch.randn(batch, seqlen, few, dims[0]).to(dtype),
        "k": torch.randn(batch, seqlen, few, dims[0]).to(dtype),
        "v": torch.randn(batch, seqlen, many, dims[1]).to(dtype),
        "g": -torch.rand(batch, seqlen, many, dtype=wide),
        "beta": 2 * torch.rand(batch, seqlen, many, dtype=wide),
    }
    if raw:
        given["g"] = torch.randn(batch, seqlen, many).to(dtype)
        given["beta"] = torch.randn(batch, seqlen, many).to(dtype)
        given["A_log"] = torch.randn(many, dtype=wide)
        given["dt_bias"] = torch.randn(many).to(dtype)
        given.update(qk_l2norm=True, beta_sigmoid=True, allow_neg_eigval=True)
    else:
        given["k"] = torch.nn.functional.normalize(given["k"].to(wide), dim=-1).to(dtype)
    if packed is not None:
        given["cu_seqlens"] = torch.tensor([0, *packed]).cumsum(0)
    if state:
        count = batch if packed is None else len(packed)
        given["initial_state"] = torch.randn(count, many, *dims, dtype=wide)
    return given


def differentiable(given: Tensors) -> Tensors:
    return {
        name: x.detach().clone().requires_grad_()
        for name, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }


def positional(given: Tensors, layout: str = "kv") -> tuple[Any, ...]:
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "scale")
    flags = (given.get(x, False) for x in ("qk_l2norm", "beta_sigmoid", "allow_neg_eigval"))
    return (*(given.get(x) for x in names), *flags, layout, "auto")
