"""Every feature of attention as a small call: what the matrix of tests runs over.

Lengths straddle the tiles of every kernel; memory that no sequence covers is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from device_call import DEVICE, check_gradients, replace_inputs
from oracle import Call

SEED_AND_OFFSET = (2**45 + 17, 12)


@dataclass(frozen=True)
class Case:
    """A call, and what is asked of it beside its result."""

    call: Call
    layout: str = "bshd"
    max_seqlen: int | None = None  # None: the longest
    lse_gradient: bool = False
    deterministic: bool = False

    def check_gradients(self, backend: str) -> None:
        """Differentiate the call on `backend` and compare with the oracle."""
        check_gradients(
            self.call,
            backend,
            layout=self.layout,
            max_seqlen=self.max_seqlen,
            deterministic=self.deterministic,
            lse_gradient=self.lse_gradient,
        )


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def dense(
    head_dim: int,
    dtype: torch.dtype,
    lengths: tuple[int, int] = (150, 270),
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    head_dim_v: int | None = None,
    **options: Any,
) -> Call:
    """Random q, k and v [batch, sequence, heads, head_dim]."""
    q = normal(batch, lengths[0], heads[0], head_dim, dtype=dtype)
    k = normal(batch, lengths[1], heads[1], head_dim, dtype=dtype)
    v = normal(batch, lengths[1], heads[1], head_dim_v or head_dim, dtype=dtype)
    return Call(q, k, v, **options)


def packed(
    head_dim: int,
    dtype: torch.dtype,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    outside: tuple[int, int] = (0, 0),
    used: Sequence[int] | None = None,
    dense_keys: bool = False,
    head_dim_v: int | None = None,
    **options: Any,
) -> Call:
    """Sequences in one row; `outside` are rows before and after them, `used` bounds the keys."""

    def bounds(lengths: Sequence[int]) -> torch.Tensor:
        edges = accumulate(lengths, initial=outside[0])
        return torch.tensor(list(edges), dtype=torch.int32, device=DEVICE)

    def rows(lengths: Sequence[int], kept: Sequence[int], count: int, dim: int) -> torch.Tensor:
        values = torch.full((sum(lengths) + sum(outside), count, dim), torch.nan, device=DEVICE)
        for first, length in zip(accumulate(lengths, initial=outside[0]), kept, strict=False):
            values[first : first + length] = torch.randn(length, count, dim, device=DEVICE)
        return values.to(dtype)

    seen = lengths_k if used is None else used
    q = rows(lengths_q, lengths_q, heads[0], head_dim)
    k = rows(lengths_k, seen, heads[1], head_dim)
    v = rows(lengths_k, seen, heads[1], head_dim_v or head_dim)
    cu_seqlens_k: torch.Tensor | None = bounds(lengths_k)
    if dense_keys:
        cache = slice(outside[0], outside[0] + sum(lengths_k))
        k, v = (tensor[cache].unflatten(0, (len(lengths_k), -1)) for tensor in (k, v))
        cu_seqlens_k = None
    seqused_k = None if used is None else torch.tensor(used, dtype=torch.int32, device=DEVICE)
    return Call(
        *(q, k, v),
        cu_seqlens_q=bounds(lengths_q),
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        **options,
    )


def many_sequences(head_dim: int, dtype: torch.dtype, tiles: int, **options: Any) -> Call:
    """At least as many tiles of packed sequences, most of them short: blocks take several."""
    lengths = [64, 1, 0, 150, 40, 33] * 10 + [640]
    heads = -(-tiles // len(lengths))
    # Other lengths of queries than of keys: some tiles are seen by nobody.
    return packed(
        head_dim, dtype, lengths, lengths[1:] + lengths[:1], heads=(2 * heads, heads), **options
    )


def slopes(*shape: int) -> torch.Tensor:
    return torch.rand(shape, device=DEVICE) * 0.3


def rng_state() -> torch.Tensor:
    return torch.tensor(SEED_AND_OFFSET, device=DEVICE)


def bias(
    batch: int, heads: int, dtype: torch.dtype, lengths: tuple[int, int] = (150, 270)
) -> torch.Tensor:
    return normal(batch, heads, *lengths, dtype=dtype)


def sinks(heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Some that take much of a row, some that take nothing."""
    values = torch.linspace(5, -3, heads, device=DEVICE)
    if heads > 1:
        values[-1] = -torch.inf
    return values.to(dtype)


def hiding_bias(dtype: torch.dtype) -> torch.Tensor:
    """One that hides some keys from everyone, some queries' all, and most of a tile."""
    values = bias(2, 4, dtype)
    values[:, :, :, 3:9] = -torch.inf
    values[:, 1, 60:70] = -torch.inf
    values[1, :, :, 40:200] = -torch.inf
    return values


def other_head_dim(head_dim: int) -> int:
    """A value head dim that differs: smaller where the query's is large."""
    return {16: 32, 40: 24, 64: 128, 96: 64, 128: 64, 192: 128, 256: 192}.get(head_dim, 64)


_Q, _K = (70, 130, 1, 64), (90, 40, 200, 64)
_NONE_Q, _NONE_K = (0, 65, 0, 30, 33, 0), (40, 70, 0, 0, 129, 0)
_MANY = (600, *range(40))

Maker = Callable[[int, torch.dtype], Case]
FEATURES: dict[str, Maker] = {
    "full": lambda d, t: Case(dense(d, t)),
    "causal": lambda d, t: Case(dense(d, t, causal=True), layout="bhsd"),
    "causal-more-queries": lambda d, t: Case(dense(d, t, (270, 150), causal=True)),
    "window-left": lambda d, t: Case(dense(d, t, window=(37, -1))),
    "window-right": lambda d, t: Case(dense(d, t, window=(-1, 20))),
    "window-both": lambda d, t: Case(dense(d, t, (270, 270), window=(20, 5))),
    "window-causal": lambda d, t: Case(dense(d, t, window=(64, 3), causal=True)),
    "window-wider-than-all": lambda d, t: Case(dense(d, t, window=(1000, 1000))),
    "window-over-nothing": lambda d, t: Case(dense(d, t, (270, 60), window=(10, 10))),
    "softcap": lambda d, t: Case(dense(d, t, softcap=2.0)),
    "softcap-window": lambda d, t: Case(dense(d, t, softcap=30.0, window=(50, 0))),
    "alibi-heads": lambda d, t: Case(dense(d, t, alibi_slopes=slopes(4))),
    "alibi-batch-causal": lambda d, t: Case(dense(d, t, alibi_slopes=slopes(2, 4), causal=True)),
    "mha": lambda d, t: Case(dense(d, t, heads=(3, 3)), layout="bhsd->bshd"),
    "mqa-causal": lambda d, t: Case(dense(d, t, heads=(4, 1), causal=True)),
    "lse": lambda d, t: Case(dense(d, t, causal=True), lse_gradient=True),
    "bias": lambda d, t: Case(dense(d, t, bias=bias(2, 4, t))),
    "bias-per-head": lambda d, t: Case(dense(d, t, bias=bias(1, 4, t), causal=True)),
    "bias-per-batch": lambda d, t: Case(dense(d, t, bias=bias(2, 1, torch.float32))),
    "bias-for-all": lambda d, t: Case(dense(d, t, bias=bias(1, 1, torch.float32))),
    "bias-that-hides": lambda d, t: Case(dense(d, t, bias=hiding_bias(torch.float32))),
    "sinks": lambda d, t: Case(dense(d, t, sinks=sinks(4, t))),
    "sinks-causal": lambda d, t: Case(
        dense(d, t, sinks=sinks(4, torch.float32), causal=True), layout="bhsd", lse_gradient=True
    ),
    "sinks-more-queries": lambda d, t: Case(
        dense(d, t, (270, 150), sinks=sinks(4, t), causal=True), lse_gradient=True
    ),
    "sinks-window": lambda d, t: Case(
        dense(d, t, sinks=sinks(4, t), window=(50, 0)), deterministic=True
    ),
    "sinks-softcap": lambda d, t: Case(dense(d, t, sinks=sinks(4, t), softcap=2.0)),
    "sinks-bias": lambda d, t: Case(dense(d, t, sinks=sinks(4, t), bias=bias(1, 4, t))),
    "sinks-dropout": lambda d, t: Case(
        dense(d, t, sinks=sinks(4, t), dropout_p=0.2, rng_state=rng_state(), causal=True)
    ),
    "dropout": lambda d, t: Case(dense(d, t, dropout_p=0.2, rng_state=rng_state())),
    "dropout-causal": lambda d, t: Case(
        dense(d, t, dropout_p=0.5, rng_state=rng_state(), causal=True)
    ),
    "head-dim-v": lambda d, t: Case(dense(d, t, head_dim_v=other_head_dim(d), causal=True)),
    "deterministic": lambda d, t: Case(dense(d, t, (270, 270), causal=True), deterministic=True),
    "packed": lambda d, t: Case(packed(d, t, _Q, _K)),
    "packed-causal": lambda d, t: Case(packed(d, t, _Q, _K, causal=True), deterministic=True),
    "packed-zero-lengths": lambda d, t: Case(
        packed(d, t, _NONE_Q, _NONE_K, causal=True), lse_gradient=True
    ),
    "packed-offset": lambda d, t: Case(
        packed(d, t, _Q, _K, outside=(7, 90), window=(30, 10)), max_seqlen=1024
    ),
    "packed-sinks": lambda d, t: Case(
        packed(d, t, _NONE_Q, _NONE_K, sinks=sinks(4, t), outside=(7, 90), causal=True),
        lse_gradient=True,
    ),
    "packed-sinks-cache": lambda d, t: Case(
        packed(
            *(d, t, _Q, (200,) * 4),
            sinks=sinks(4, torch.float32),
            dense_keys=True,
            used=(90, 200, 130, 0),
            causal=True,
        )
    ),
    "packed-one-giant": lambda d, t: Case(packed(d, t, _MANY, _MANY, causal=True)),
    "packed-used": lambda d, t: Case(packed(d, t, _Q, _K, used=(90, 3, 0, 63))),
    "packed-cache": lambda d, t: Case(
        packed(d, t, _Q, (200,) * 4, dense_keys=True, used=(90, 200, 130, 0), causal=True)
    ),
    "packed-extras": lambda d, t: Case(
        packed(
            *(d, t, _Q, _K),
            alibi_slopes=slopes(4, 4),
            dropout_p=0.1,
            rng_state=rng_state(),
            window=(40, 0),
        )
    ),
    "packed-softcap": lambda d, t: Case(packed(d, t, _Q, _K, softcap=5.0, causal=True)),
}


def rearranged(call: Call, arrange: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The same numbers in other storage."""
    return replace_inputs(call, {name: arrange(vars(call)[name]) for name in ("q", "k", "v")})


def between_odd_elements(values: torch.Tensor) -> torch.Tensor:
    """The same values, each row one element after the end of another: off 16 bytes."""
    room = values.new_full((*values.shape[:-1], values.shape[-1] + 1), torch.nan)
    return room[..., 1:].copy_(values)


def modified(name: str, dtype: torch.dtype, batch: int, heads: int) -> dict[str, Any]:
    """Options that change scores or weights."""
    return {
        "none": {},
        "softcap": {"softcap": 3.0},
        "alibi": {"alibi_slopes": slopes(heads) * 0.02},
        "alibi-batch": {"alibi_slopes": slopes(batch, heads) * 0.02},
        "sinks": {"sinks": sinks(heads, dtype)},
        "sinks-fp32": {"sinks": sinks(heads, torch.float32)},
        "dropout": {"dropout_p": 0.3, "rng_state": rng_state()},
        "negative-scale": {"scale": -0.2},
        "zero-scale": {"scale": 0.0},
    }[name]
