"""What `flashvar warmup merge_states` may be asked: kinds of calls that share their kernels."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from flashvar.cli.comma_lists import names, numbers, unique
from flashvar.errors import InvalidInputError
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD, SPEC
from flashvar.selection.request import Request

_DTYPES: Final = tuple(SPEC.triton)


@dataclass(frozen=True)
class Kind:
    """Calls of one dtype, head dim and number of parts; those of training have a backward."""

    dtype: str
    head_dim: int
    parts: int
    training: bool

    def __str__(self) -> str:
        """In words."""
        direction = "forward and backward" if self.training else "forward"
        return f"{direction} {self.dtype} head dim {self.head_dim}, {self.parts} parts"

    def requests(self, device: int) -> tuple[Request, ...]:
        """What selection is asked."""
        functions = (FORWARD, BACKWARD) if self.training else (FORWARD,)
        return tuple(Request.of(name, self.dtype, device) for name in functions)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return dict(vars(self))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that say which calls are meant; every combination is."""
    parser.add_argument(
        "--head-dim",
        type=numbers,
        nargs="+",
        default=[[64, 128]],
        metavar="N",
        help="such as 64,128 (default: 64,128)",
    )
    parser.add_argument(
        "--parts",
        type=numbers,
        nargs="+",
        default=[[2]],
        metavar="N",
        help="how many are merged, such as 2,4 (default: 2); of parts that are stacked any number",
    )
    parser.add_argument(
        "--dtype",
        type=names(_DTYPES),
        nargs="+",
        default=[["bf16"]],
        metavar="T",
        help=f"of {', '.join(_DTYPES)} (default: bf16)",
    )
    parser.add_argument("--backward", action="store_true", help="training too, with gradients")


def kinds(chosen: argparse.Namespace) -> list[Kind]:
    """The kinds of calls that the options mean.

    Raises:
        InvalidInputError: a head dim or a number of parts below 1.
    """
    dtypes = unique(chosen.dtype)
    head_dims, parts = unique(chosen.head_dim), unique(chosen.parts)
    for name, number in (*(("head dim", n) for n in head_dims), *(("part", n) for n in parts)):
        if number < 1:
            raise InvalidInputError(f"expected at least one {name}, got {number}: correct it")
    return [
        Kind(dtype, head_dim, count, training)
        for dtype, head_dim, count, training in product(
            dtypes, head_dims, parts, (False, True) if chosen.backward else (False,)
        )
    ]


def compile_here(kind: Kind, device: int) -> None:
    """Compile the kernels of a kind of call on `cuda:device`, by one small call."""
    import torch

    from flashvar.ops.dtypes import DTYPES
    from flashvar.ops.merge_states.api import merge_states

    dtype = next(one for one, name in DTYPES.items() if name == kind.dtype)
    where = torch.device("cuda", device)
    shape = (1, 2, 2, kind.head_dim)
    outs = [torch.zeros(shape, dtype=dtype, device=where) for _ in range(kind.parts)]
    lses = [torch.zeros(1, 2, 2, device=where) for _ in range(kind.parts)]
    leaves = [one.requires_grad_(kind.training) for one in (*outs, *lses)]
    results = merge_states(outs, lses, backend="triton")
    if kind.training:
        torch.autograd.grad(results, leaves, [torch.zeros_like(one) for one in results])


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile them for a device that is not here."""
    from flashvar.backends.triton.merge_states import warmup

    warmup.compile_for(kind, capability)
