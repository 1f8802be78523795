"""`flashvar warmup` for causal_conv1d: its options, and the kinds of calls they select."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from flashvar.cli.comma_lists import numbers, unique
from flashvar.errors import ConfigurationError
from flashvar.ops.causal_conv1d.spec import BACKWARD, FORWARD, SPEC, UPDATE
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
_WIDTHS: Final = (2, 3, 4)
_DIM: Final = 256


@dataclass(frozen=True)
class Kind(AnyKind):
    """Calls of one dtype and width with SiLU, of prompts and of tokens after them."""

    dtype: str
    width: int
    bias: bool
    packed: bool
    training: bool

    def __str__(self) -> str:
        """The kind in words."""
        direction = "forward and backward" if self.training else "forward and update"
        features = [*["bias"] * self.bias, *["packed"] * self.packed]
        return " ".join((direction, self.dtype, f"width {self.width}", *features))

    def requests(self, device: int) -> tuple[Request, ...]:
        """The selection requests."""
        functions = (FORWARD, BACKWARD) if self.training else (FORWARD, UPDATE)
        return tuple(Request.of(name, self.dtype, device) for name in functions)

    def to_json(self) -> dict[str, Any]:
        """The fields, for --json."""
        return dict(vars(self))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select calls; they select every combination."""
    add_sizes(parser, "--width", numbers, [4], "e.g. 2,4 (default: 4)")
    add_dtype(parser, _DTYPES)
    parser.add_argument("--bias", action="store_true", help="with a bias")
    add_varlen(parser)
    add_backward(parser)


def kinds(chosen: argparse.Namespace) -> list[Kind]:
    """The kinds of calls that the options select.

    Raises:
        ConfigurationError: a width that no kernel has.
    """
    widths = unique(chosen.width)
    for width in widths:
        if width not in _WIDTHS:
            raise ConfigurationError(
                f"--width: expected 2 to 4, found {width}: leave it out, other widths have no "
                "kernel"
            )
    return [
        Kind(dtype, width, chosen.bias, chosen.varlen, gradients)
        for width, dtype, gradients in product(widths, unique(chosen.dtype), training(chosen))
    ]


def tensors_of(kind: Kind, where: Any) -> dict[str, Any]:
    """Arguments of a small call, laid out in memory as those of calls of any size."""
    import torch

    from flashvar.ops.dtypes import dtype_of

    dtype = dtype_of(kind.dtype)
    ends = torch.tensor([0, 64], dtype=torch.int32, device=where) if kind.packed else None
    return {
        "x": torch.zeros(1, 64, _DIM, dtype=dtype, device=where),
        "weight": torch.zeros(_DIM, kind.width, dtype=dtype, device=where),
        "bias": torch.zeros(_DIM, dtype=dtype, device=where) if kind.bias else None,
        "cu_seqlens": ends,
    }


def compile_here(kind: Kind, device: int) -> None:
    """Compile the kernels of a kind of call on `cuda:device`, by small calls."""
    import torch

    from flashvar.ops.causal_conv1d.api import causal_conv1d, causal_conv1d_update

    given = tensors_of(kind, torch.device("cuda", device))
    options: dict[str, Any] = {"activation": "silu", "backend": "triton"}
    if kind.training:
        given["x"].requires_grad_()
        y = causal_conv1d(**given, **options)
        torch.autograd.grad(y, given["x"], torch.zeros_like(y))
        return
    y, state = causal_conv1d(**given, **options, return_final_state=True)
    causal_conv1d_update(y[:, 0], state, given["weight"], given["bias"], **options)


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile the kernels for a GPU that is not in this machine."""
    from flashvar.backends.triton.causal_conv1d import warmup

    warmup.compile_for(kind, capability)
