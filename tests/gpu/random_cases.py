"""Random calls of attention that together cover every pair of feature, size, dtype and storage."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from features import Case, bias, dense, packed, rng_state, sinks, slopes
from oracle import Call

# What a case is drawn from. Any two values of two axes meet in some case.
AXES: dict[str, tuple[Any, ...]] = {
    "head_dim": (8, 16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256),
    "dtype": ("bf16", "fp16"),
    "mask": ("full", "causal", "left", "both"),
    "extra": ("none", "softcap", "alibi", "bias", "sinks", "dropout"),
    "seqlen_q": (1, 7, 64, 65, 129, 333, 1000),
    "seqlen_k": (1, 7, 63, 128, 200, 1000),
    "heads": ((1, 1), (3, 3), (4, 2), (6, 1)),
    "storage": ("contiguous", "padded", "heads-first", "packed", "cache"),
    "head_dim_v": ("same", "other"),
    "lse_gradient": (False, True),
    "deterministic": (False, True),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TRIES = 30


@dataclass(frozen=True)
class RandomCase:
    """One call: everything but its numbers."""

    head_dim: int
    dtype: str
    mask: str
    extra: str
    seqlen_q: int
    seqlen_k: int
    heads: tuple[int, int]
    storage: str
    head_dim_v: str
    lse_gradient: bool
    deterministic: bool
    batch: int
    scale: float | None

    def __str__(self) -> str:
        words = [
            f"d{self.head_dim}" if self.head_dim_v == "same" else f"d{self.head_dim}:{self._dim_v}",
            *(self.dtype, self.mask, self.extra, f"{self.seqlen_q}x{self.seqlen_k}"),
            *("h{}:{}".format(*self.heads), f"b{self.batch}", self.storage),
        ]
        words += ["lse"] if self.lse_gradient else []
        words += ["deterministic"] if self.deterministic else []
        return "-".join(words if self.scale is None else [*words, f"scale{self.scale}"])

    def make(self) -> Case:
        """Fresh numbers in the storage asked for."""
        options = {"scale": self.scale, **self._mask(), **self._extra()}
        layout = "bhsd" if self.storage == "heads-first" else "bshd"
        sizes = {"heads": self.heads, "head_dim_v": self._dim_v}
        dtype = DTYPES[self.dtype]
        if self.storage in ("packed", "cache"):
            lengths_q = (self.seqlen_q, 3, 0, self.seqlen_q)[: self.batch]
            lengths_k = (self.seqlen_k, 40, 9, 0)[: self.batch]
            cache: dict[str, Any] = {}
            if self.storage == "cache":
                lengths_k, cache = (max(lengths_k),) * self.batch, {"used": lengths_k}
                cache["dense_keys"] = True
            call = packed(self.head_dim, dtype, lengths_q, lengths_k, **sizes, **cache, **options)
        else:
            lengths = (self.seqlen_q, self.seqlen_k)
            call = dense(self.head_dim, dtype, lengths, batch=self.batch, **sizes, **options)
            if self.storage == "padded":
                call = Call(**{**vars(call), **{n: with_nan_around(vars(call)[n]) for n in "qkv"}})
            if self.storage == "heads-first":
                call = Call(**{**vars(call), **{n: heads_first(vars(call)[n]) for n in "qkv"}})
        return Case(call, layout, None, self.lse_gradient, self.deterministic)

    @property
    def _dim_v(self) -> int:
        return self.head_dim if self.head_dim_v == "same" else 8 + (self.head_dim + 96) % 248

    def _mask(self) -> dict[str, Any]:
        third = max(1, self.seqlen_k // 3)
        return {
            "full": {},
            "causal": {"causal": True},
            "left": {"window": (third, -1)},
            "both": {"window": (third, third // 2)},
        }[self.mask]

    def _extra(self) -> dict[str, Any]:
        if self.extra == "softcap":
            return {"softcap": 3.0}
        if self.extra == "alibi":
            return {"alibi_slopes": slopes(self.heads[0])}
        if self.extra == "sinks":
            return {"sinks": sinks(self.heads[0], DTYPES[self.dtype])}
        if self.extra == "dropout":
            return {"dropout_p": 0.3, "rng_state": rng_state()}
        if self.extra == "bias" and self.storage not in ("packed", "cache"):
            lengths = (self.seqlen_q, self.seqlen_k)
            return {"bias": bias(1, self.heads[0], DTYPES[self.dtype], lengths)}
        return {}


def with_nan_around(values: torch.Tensor) -> torch.Tensor:
    """The same values as a view of a larger tensor of NaN, each row still on 16 bytes."""
    batch, length, heads, head_dim = values.shape
    room = values.new_full((batch + 1, length + 3, heads + 1, head_dim + 16), torch.nan)
    return room[1:, 2:-1, :-1, 8:-8].copy_(values)


def heads_first(values: torch.Tensor) -> torch.Tensor:
    """The same values, stored as [batch, heads, sequence, head_dim]."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


def covering(seed: int) -> list[RandomCase]:
    """Cases in which every two values of two axes meet: of some draws, the one that adds most."""
    draw = random.Random(seed)
    names = list(AXES)
    missing = {
        pair
        for left, right in itertools.combinations(names, 2)
        for pair in itertools.product(
            ((left, value) for value in AXES[left]), ((right, value) for value in AXES[right])
        )
    }
    cases = []
    while missing:
        # Of each draw two values are a pair that is missing still.
        left = sorted(missing, key=str)
        seeds = [draw.choice(left) for _ in range(_TRIES)]
        drawn = [{name: draw.choice(AXES[name]) for name in names} | dict(pair) for pair in seeds]
        best = max(drawn, key=lambda values: len(missing & _pairs(values)))
        missing -= _pairs(best)
        scale = draw.choice([None, None, round(draw.uniform(0.01, 1.5), 2)])
        cases.append(RandomCase(**best, batch=draw.choice([1, 2, 4]), scale=scale))
    return cases


def _pairs(values: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(values.items(), 2))
