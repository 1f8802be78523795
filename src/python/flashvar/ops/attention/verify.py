"""The calls of attention that `doctor --verify` checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from flashvar.cli.verify import Case, Tensors
from flashvar.ops.attention.api import attention
from flashvar.ops.attention.varlen import attention_varlen
from flashvar.ops.op import Value

_BATCH: Final = 2
_QUERIES, _KEYS = 197, 261  # of no whole tile
_HEADS, _HEADS_KV = 4, 2
_ENDS: Final = (0, 70, 70, 197)  # of packed sequences, one of them empty
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "causal": {"causal": True},
    "full": {},
    "window and softcap": {"causal": True, "window_size": (50, 0), "softcap": 5.0},
    "deterministic": {"causal": True, "deterministic": True},
}


def cases(dtype: torch.dtype, axes: tuple[Value, ...], random: torch.Generator) -> Iterator[Case]:
    """Masks, modified scores, a bias, sinks, packed sequences and rows that start anywhere."""
    (dims,) = axes
    assert not isinstance(dims, str)
    kind = f"{dtype}".removeprefix("torch.") + f" {'x'.join(map(str, dict.fromkeys(dims)))}"

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    plain = {
        "q": made(_BATCH, _QUERIES, _HEADS, dims[0]),
        "k": made(_BATCH, _KEYS, _HEADS_KV, dims[0]),
        "v": made(_BATCH, _KEYS, _HEADS_KV, dims[-1]),
    }
    for name, options in _OPTIONS.items():
        yield Case(f"{name} {kind}", plain, _call(**options), tuple(plain))
    slopes = torch.arange(1, _HEADS + 1)
    yield Case(f"alibi {kind}", {**plain, "slopes": slopes}, _alibi, tuple(plain))
    philox = {**plain, "rng_state": torch.tensor([3, 5])}
    yield Case(f"dropout {kind}", philox, _call(dropout_p=0.25), tuple(plain))
    biased = {**plain, "bias": made(1, _HEADS, _QUERIES, _KEYS)}
    yield Case(f"bias {kind}", biased, _call(), tuple(biased))
    with_sinks = {**plain, "sinks": made(_HEADS)}
    yield Case(f"sinks {kind}", with_sinks, _call(causal=True), tuple(with_sinks))
    ends = torch.tensor(_ENDS, dtype=torch.int32)
    packed = {
        "q": made(_QUERIES, _HEADS, dims[0]),
        "k": made(_QUERIES, _HEADS_KV, dims[0]),
        "v": made(_QUERIES, _HEADS_KV, dims[-1]),
    }
    yield Case(f"packed {kind}", {**packed, "cu_seqlens_q": ends}, _packed, tuple(packed))
    wide = {name: torch.nn.functional.pad(one, (1, 0)) for name, one in plain.items()}
    yield Case(f"unaligned {kind}", wide, _unaligned, tuple(wide))


def _call(**options: Any) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
    return lambda given: attention(**given, **options, return_lse=True)


def _alibi(given: Tensors) -> tuple[torch.Tensor, ...]:
    tensors = {name: one for name, one in given.items() if name != "slopes"}
    return (attention(**tensors, alibi_slopes=given["slopes"] / 64, causal=True),)


def _packed(given: Tensors) -> tuple[torch.Tensor, ...]:
    found = attention_varlen(**given, causal=True)
    assert isinstance(found, torch.Tensor)
    return (found,)


def _unaligned(given: Tensors) -> tuple[torch.Tensor, ...]:
    return (attention(*(one[..., 1:] for one in given.values()), causal=True),)
