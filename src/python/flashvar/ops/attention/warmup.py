"""`flashvar warmup` for attention: its options, and the kinds of calls they select."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from flashvar.cli.comma_lists import pairs, unique
from flashvar.errors import ConfigurationError
from flashvar.ops.attention.spec import BACKWARD, FORWARD, HEAD_DIM_MAX, HEAD_DIM_STEP
from flashvar.ops.op import value_text
from flashvar.ops.warmup_options import AnyKind, add_backward, add_dtype, add_sizes, training
from flashvar.selection.request import Request

# Features of a call besides q, k and v, and their help texts.
FEATURES: Final = {
    "window": "a sliding window",
    "softcap": "softcapped scores",
    "alibi": "ALiBi slopes",
    "bias": "an additive bias or mask",
    "sinks": "attention sinks",
    "dropout": "dropout",
    "varlen": "packed sequences",
    "seqused": "a KV cache with per-sequence lengths",
}
_DTYPES: Final = ("bf16", "fp16")


@dataclass(frozen=True)
class Kind(AnyKind):
    """Calls that use the same kernels. Training calls store the log-sum-exp and have a backward."""

    dtype: str  # "bf16" or "fp16"
    head_dim: int
    head_dim_v: int
    causal: bool
    training: bool
    features: frozenset[str] = frozenset()  # all used by one call

    def __str__(self) -> str:
        """The kind in words, e.g. `forward bf16 head dim 64 causal`."""
        with_what = [one for one in FEATURES if one in self.features]
        return " ".join(
            (
                "forward and backward" if self.training else "forward",
                self.dtype,
                f"head dim {value_text((self.head_dim, self.head_dim_v))}",
                "causal" if self.causal else "full",
                *([f"({', '.join(with_what)})"] if with_what else []),
            )
        )

    def requests(self, device: int) -> tuple[Request, ...]:
        """The selection requests, with head dims padded as flashvar.attention pads them."""
        dims = tuple(
            -(-n // HEAD_DIM_STEP) * HEAD_DIM_STEP for n in (self.head_dim, self.head_dim_v)
        )
        functions = (FORWARD, BACKWARD) if self.training else (FORWARD,)
        return tuple(Request(name, self.dtype, device, (dims,)) for name in functions)

    @property
    def triton_too(self) -> bool:
        """Triton divides the keys of few queries, which binaries do not with score modifiers."""
        modified = not self.features.isdisjoint({"softcap", "alibi", "bias"})
        return modified and self.features.isdisjoint({"varlen", "dropout"})

    def to_json(self) -> dict[str, Any]:
        """The fields, for --json."""
        return {**vars(self), "features": sorted(self.features)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select calls; they select every combination."""
    dims_help = "e.g. 64,128, or 192x128 if v has its own (default: 64,128)"
    add_sizes(parser, "--head-dim", pairs, [(64, 64), (128, 128)], dims_help)
    add_dtype(parser, _DTYPES)
    parser.add_argument("--causal", action="store_true", help="causal calls (default: both)")
    parser.add_argument(
        "--full", action="store_true", help="calls without a causal mask (default: both)"
    )
    add_backward(parser)
    features = parser.add_argument_group("features of every call; run warmup again for other calls")
    for name, help_text in FEATURES.items():
        features.add_argument(f"--{name}", action="store_true", help=help_text)


def kinds(chosen: argparse.Namespace) -> list[Kind]:
    """The kinds of calls that the options select.

    Raises:
        ConfigurationError: a head dim or a pair of features is not supported.
    """
    dims = unique(chosen.head_dim)
    for pair in dims:
        if not all(1 <= dim <= HEAD_DIM_MAX for dim in pair):
            raise ConfigurationError(
                f"--head-dim: expected 1 to {HEAD_DIM_MAX}, found {value_text(pair)}: leave it "
                'out, larger head dims run only with backend="reference"'
            )
    features = frozenset(one for one in FEATURES if getattr(chosen, one))
    if {"bias", "varlen"} <= features:
        raise ConfigurationError(
            "bias cannot be combined with packed sequences, found --bias and --varlen: run warmup "
            "for each"
        )
    causal = (*[True] * chosen.causal, *[False] * chosen.full) or (True, False)
    return [
        Kind(dtype, head_dim, head_dim_v, one, gradients, features)
        for (head_dim, head_dim_v), dtype, one, gradients in product(
            dims, unique(chosen.dtype), causal, training(chosen)
        )
    ]


def compile_here(kind: Kind, device: int) -> None:
    """Compile the kernels of a kind of call on `cuda:device`."""
    from flashvar.backends.triton.attention import warmup

    warmup.run(kind, device)


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile the kernels of a kind of call for a GPU that is not in this machine."""
    from flashvar.backends.triton.attention import warmup

    warmup.compile_for(kind, capability)
