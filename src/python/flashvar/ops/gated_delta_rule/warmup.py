"""`flashvar warmup` for gated_delta_rule: its options, and the kinds of calls they select."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from flashvar.cli.comma_lists import pairs, unique
from flashvar.errors import ConfigurationError
from flashvar.ops.gated_delta_rule.spec import (
    BACKWARD,
    FORWARD,
    MAX_BACKWARD_HEAD_DIM,
    SPEC,
    UPDATE,
)
from flashvar.ops.op import value_text
from flashvar.ops.warmup_options import (
    AnyKind,
    add_backward,
    add_dtype,
    add_sizes,
    add_varlen,
    training,
)
from flashvar.selection.request import Request

_DTYPES: Final = tuple(SPEC.triton)
# Tokens of a small call that is computed in chunks.
_TOKENS: Final = 64


@dataclass(frozen=True)
class Kind(AnyKind):
    """Calls of one dtype and of one K and V, of prompts and of tokens after them."""

    dtype: str
    head_dim: int
    head_dim_v: int
    raw: bool  # gates, beta, q and k are activated by the kernels
    packed: bool
    training: bool

    def __str__(self) -> str:
        """The kind in words."""
        direction = "forward and backward" if self.training else "forward and update"
        features = [*["raw"] * self.raw, *["packed"] * self.packed]
        dims = f"K {self.head_dim} V {self.head_dim_v}"
        return " ".join((direction, self.dtype, dims, *features))

    def requests(self, device: int) -> tuple[Request, ...]:
        """The selection requests."""
        functions = (FORWARD, BACKWARD) if self.training else (FORWARD, UPDATE)
        return tuple(
            Request.of(name, self.dtype, device, head_dim=self.head_dim) for name in functions
        )

    def to_json(self) -> dict[str, Any]:
        """The fields, for --json."""
        return dict(vars(self))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select calls; they select every combination."""
    dims_help = "e.g. 64,128, or 96x192 for K and V (default: 128)"
    add_sizes(parser, "--head-dim", pairs, [(128, 128)], dims_help)
    add_dtype(parser, _DTYPES)
    parser.add_argument(
        "--raw", action="store_true", help="with qk_l2norm, beta_sigmoid, A_log and dt_bias"
    )
    add_varlen(parser)
    add_backward(parser)


def kinds(chosen: argparse.Namespace) -> list[Kind]:
    """The kinds of calls that the options select.

    Raises:
        ConfigurationError: a head dim that no kernel takes.
    """
    dims = unique(chosen.head_dim)
    for k, v in dims:
        if min(k, v) < 1 or (chosen.backward and k > MAX_BACKWARD_HEAD_DIM):
            raise ConfigurationError(
                "--head-dim: expected K and V from 1, and with --backward K up to "
                f"{MAX_BACKWARD_HEAD_DIM}, found {value_text((k, v))}: leave it out, "
                'gradients of larger K run only with backend="reference"'
            )
    return [
        Kind(dtype, k, v, chosen.raw, chosen.varlen, gradients)
        for (k, v), dtype, gradients in product(dims, unique(chosen.dtype), training(chosen))
    ]


def inputs_of(kind: Kind, tokens: int, where: Any) -> dict[str, Any]:
    """Arguments of a small call, laid out in memory as those of calls of any size."""
    import torch

    from flashvar.ops.dtypes import dtype_of

    dtype = dtype_of(kind.dtype)
    given: dict[str, Any] = {
        "q": torch.zeros(1, tokens, 2, kind.head_dim, dtype=dtype, device=where),
        "k": torch.zeros(1, tokens, 2, kind.head_dim, dtype=dtype, device=where),
        "v": torch.zeros(1, tokens, 4, kind.head_dim_v, dtype=dtype, device=where),
        "g": torch.zeros(1, tokens, 4, device=where),
        "beta": torch.zeros(1, tokens, 4, dtype=dtype, device=where),
        "cu_seqlens": None,
    }
    if kind.packed:
        given["cu_seqlens"] = torch.tensor([0, tokens], dtype=torch.int32, device=where)
    if kind.raw:
        heads = torch.zeros(4, device=where)
        given.update(A_log=heads, dt_bias=heads.clone(), qk_l2norm=True, beta_sigmoid=True)
    return given


def compile_here(kind: Kind, device: int) -> None:
    """Compile the kernels of a kind of call on `cuda:device`, by small calls."""
    import torch

    from flashvar.ops.gated_delta_rule.api import gated_delta_rule

    where = torch.device("cuda", device)
    given = inputs_of(kind, _TOKENS, where)
    if kind.training:
        given["v"].requires_grad_()
        out, _ = gated_delta_rule(**given, backend="triton")
        torch.autograd.grad(out, given["v"], torch.zeros_like(out))
        return
    gated_delta_rule(**given, backend="triton")
    states = torch.zeros(1, 4, kind.head_dim, kind.head_dim_v, device=where)
    gated_delta_rule(
        **inputs_of(kind, 1, where),
        initial_state=states,
        state_indices=torch.zeros(1, dtype=torch.int32, device=where),
        backend="triton",
    )


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile the kernels for a GPU that is not in this machine."""
    from flashvar.backends.triton.gated_delta_rule import warmup

    warmup.compile_for(kind, _TOKENS, capability)
