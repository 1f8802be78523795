"""Which family of kernels inside a binary a call takes, and why.

The binary decides this itself at every call (`src/cuda/<family>/attention_*_launch.cuh`); here is
the same rule in words, for doctor and for the log. Pure, and it sees no tensor: addresses and
strides alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from flashvar.manifest import KernelRow

WGMMA: Final = "wgmma"
MMA_SYNC: Final = "mma.sync"
# The folder of a kernel's sources, which its manifest names: those that hold both families.
_BOTH: Final = "hopper"

# TMA, which feeds the wgmma kernels, addresses memory in pieces of this many bytes.
_PIECE: Final = 16
_ELEMENT: Final = 2  # bytes of bf16 and fp16
_STEP: Final = _PIECE // _ELEMENT
# What the wgmma backward has been shown to be right for; attention_bwd_launch.cuh, `suits`.
_BACKWARD: Final = "attention_bwd"
BACKWARD_DTYPES: Final = frozenset({"bf16"})
BACKWARD_HEAD_DIMS: Final = frozenset({256, 128, 64})
_SHOWN: Final = (
    f"{', '.join(sorted(BACKWARD_DTYPES))}, "
    f"head dims {', '.join(map(str, sorted(BACKWARD_HEAD_DIMS)))}"
)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a tensor start: its address in bytes, its strides in elements."""

    name: str
    address: int
    batch: int
    sequence: int
    heads: int


@dataclass(frozen=True)
class Choice:
    """A family, and why it is the one."""

    family: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """When the calls that a kernel serves take a family."""

    family: str
    when: str


def rules(kernel: KernelRow, dims: tuple[int, int]) -> tuple[Rule, ...]:
    """The families of a kernel for calls of these head dims, the one asked first leading."""
    if kernel.family != _BOTH:
        return (Rule(MMA_SYNC, "every call"),)
    if any(_not_shown(kernel, dims)):
        return (Rule(MMA_SYNC, f"every call: the wgmma backward serves {_SHOWN}"),)
    when = "rows start on 16 bytes, so that TMA can address them"
    if kernel.op == _BACKWARD:
        when += "; dense, no bias, ALiBi, softcap or dropout, not deterministic"
    return (Rule(WGMMA, when), Rule(MMA_SYNC, "every other call"))


def choose(
    kernel: KernelRow, dims: tuple[int, int], tensors: Iterable[Rows], special: Iterable[str]
) -> Choice:
    """What a call takes.

    `dims` are the call's head dims, `special` what it asks for beside plain dense attention.
    """
    misplaced = unaligned(tensors)
    if kernel.family != _BOTH:
        how = "16 bytes at a time" if misplaced is None else f"in smaller pieces, for {misplaced}"
        return Choice(MMA_SYNC, f"rows are read {how}")
    obstacles = [*_not_shown(kernel, dims)]
    if kernel.op == _BACKWARD:
        obstacles += [f"the wgmma backward does not serve {one}" for one in special]
    if misplaced is not None:
        obstacles.append(f"TMA cannot address rows of {misplaced}")
    if obstacles:
        return Choice(MMA_SYNC, obstacles[0])
    return Choice(WGMMA, "every row starts on 16 bytes, so TMA can address it")


def _not_shown(kernel: KernelRow, dims: tuple[int, int]) -> Iterator[str]:
    """Why the wgmma backward leaves a head dim or a dtype to the other family."""
    if kernel.op != _BACKWARD:
        return
    shown = kernel.dtype in BACKWARD_DTYPES and kernel.head_dim in BACKWARD_HEAD_DIMS
    if not shown or len(set(kernel.dims)) > 1:
        yield f"the wgmma backward serves {_SHOWN}, not {kernel.dtype} {kernel.dim_words}"
    if dims != kernel.dims:
        yield f"the wgmma backward does not fill up head dims, as {kernel.dim_words} would have to"


def unaligned(tensors: Iterable[Rows]) -> str | None:
    """The first tensor with a row that starts between two pieces, and why; None without one."""
    for rows in tensors:
        if rows.address % _PIECE:
            return f"{rows.name}: its address {rows.address:#x} is no multiple of {_PIECE} bytes"
        for name in ("batch", "sequence", "heads"):
            stride = getattr(rows, name)
            if stride % _STEP:
                return f"{rows.name}: its {name} stride, {stride}, is no multiple of {_STEP}"
    return None
