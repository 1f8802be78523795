"""`flashvar warmup` for merge_states: its options, and the kinds of calls they select."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from flashvar.cli.comma_lists import numbers, unique
from flashvar.errors import ConfigurationError
from flashvar.ops.merge_states.spec import BACKWARD, FORWARD, SPEC
from flashvar.ops.warmup_options import AnyKind, add_backward, add_dtype, add_sizes, training
from flashvar.selection.request import Request

if TYPE_CHECKING:
    import torch

_DTYPES: Final = tuple(SPEC.triton)
_STACKED: Final = 2  # parts of a call whose kernel is that of any number


@dataclass(frozen=True)
class Kind(AnyKind):
    """Calls of one dtype, head dim and number of parts; those of training have a backward."""

    dtype: str
    head_dim: int
    parts: int
    training: bool
    stacked: bool = False  # the kernel is that of any number of parts
    unaligned: bool = False  # outs do not start on 16 bytes

    def __str__(self) -> str:
        """The kind in words."""
        direction = "forward and backward" if self.training else "forward"
        parts = "stacked parts" if self.stacked else f"{self.parts} parts"
        unaligned = ", unaligned" if self.unaligned else ""
        return f"{direction} {self.dtype} head dim {self.head_dim}, {parts}{unaligned}"

    def tensors(self, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outs and lses of such a call, as the op takes them."""
        import torch

        from flashvar.ops.dtypes import dtype_of

        dtype = dtype_of(self.dtype)
        first = 1 if self.unaligned else 0
        shape = (1, 2, 2, self.head_dim)

        def out(*parts: int) -> torch.Tensor:
            size = math.prod((*parts, *shape))
            memory = torch.zeros(first + size, dtype=dtype, device=device)
            return memory[first:].view(*parts, *shape)

        if self.stacked:
            return [out(self.parts)], [torch.zeros(self.parts, 1, 2, 2, device=device)]
        outs = [out() for _ in range(self.parts)]
        return outs, [torch.zeros(1, 2, 2, device=device) for _ in range(self.parts)]

    def backwards(self) -> Iterator[tuple[bool, list[bool]]]:
        """Kinds of backwards: whether lse has a gradient, and the gradients that are wanted."""
        each = 1 if self.stacked else self.parts
        for of_outs, of_lses in ((True, True), (True, False), (False, True)):
            for has_grad_lse in (True, False):
                yield has_grad_lse, [of_outs] * each + [of_lses] * each

    def requests(self, device: int) -> tuple[Request, ...]:
        """The selection requests."""
        functions = (FORWARD, BACKWARD) if self.training else (FORWARD,)
        return tuple(Request.of(name, self.dtype, device) for name in functions)

    def to_json(self) -> dict[str, Any]:
        """The fields, for --json."""
        return dict(vars(self))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select calls; they select every combination."""
    add_sizes(parser, "--head-dim", numbers, [64, 128], "e.g. 64,128 (default: 64,128)")
    parts_help = "how many parts are merged, e.g. 2,4 (default: 2); not needed for stacked parts"
    add_sizes(parser, "--parts", numbers, [2], parts_help)
    add_dtype(parser, _DTYPES)
    add_backward(parser)
    parser.add_argument("--stacked", action="store_true", help="also parts stacked in one tensor")
    parser.add_argument(
        "--unaligned",
        action="store_true",
        help="also parts that do not start at multiples of 16 bytes",
    )


def kinds(chosen: argparse.Namespace) -> list[Kind]:
    """The kinds of calls that the options select.

    Raises:
        ConfigurationError: a head dim or a number of parts below 1.
    """
    dtypes = unique(chosen.dtype)
    head_dims, parts = unique(chosen.head_dim), unique(chosen.parts)
    for option, given in (("--head-dim", head_dims), ("--parts", parts)):
        if min(given) < 1:
            raise ConfigurationError(
                f"{option}: expected 1 or more, found {min(given)}: pass the numbers of your calls"
            )
    numbers_of_parts = [(count, False) for count in parts]
    if chosen.stacked:
        numbers_of_parts.append((_STACKED, True))
    return [
        Kind(dtype, head_dim, count, gradients, stacked, unaligned)
        for dtype, head_dim, (count, stacked), unaligned, gradients in product(
            dtypes,
            head_dims,
            numbers_of_parts,
            (False, True) if chosen.unaligned else (False,),
            training(chosen),
        )
    ]


def compile_here(kind: Kind, device: int) -> None:
    """Compile the kernels of a kind of call on `cuda:device`, by small calls."""
    import torch

    from flashvar.ops.merge_states import torch_library  # defines the ops

    where = torch.device("cuda", device)
    outs, lses = kind.tensors(where)
    options = kind.stacked, "bshd", "triton"
    out, lse = torch_library.merge_states_fwd(outs, lses, *options)
    for has_grad_lse, wanted in kind.backwards() if kind.training else ():
        torch.ops.flashvar.merge_states_bwd.default(
            out, lse if has_grad_lse else None, outs, lses, *options, wanted
        )


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile the kernels for a GPU that is not in this machine."""
    from flashvar.backends.triton.merge_states import warmup

    warmup.compile_for(kind, capability)
