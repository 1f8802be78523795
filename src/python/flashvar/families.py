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
_BACKWARD: Final = "attention_bwd"

# TMA, which feeds the wgmma kernels, addresses memory in pieces of this many bytes.
_PIECE: Final = 16
_ELEMENT: Final = 2  # bytes of bf16 and fp16
_STEP: Final = _PIECE // _ELEMENT

# What a call may have beside plain dense attention, in the order in which words name it.
PACKED: Final = "packed sequences"
BIAS: Final = "a bias"
FEATURES: Final = (BIAS, "ALiBi slopes", "softcap", "dropout")
DETERMINISTIC: Final = "deterministic gradients"
_SPECIAL: Final = (PACKED, *FEATURES, DETERMINISTIC)


@dataclass(frozen=True)
class Limits:
    """What a wgmma kernel leaves to the other family; None: it takes them all."""

    dtypes: frozenset[str] | None = None
    head_dims: frozenset[int] | None = None
    pairs: bool = True  # whether values may have another head dim
    filled: bool = True  # whether a call's head dim may be less than the kernel's
    left: frozenset[str] = frozenset()  # of what a call may have beside plain dense attention


# `suits` of src/cuda/sm90/attention_bwd_launch.cuh; tests/unit/test_families.py compares them.
BACKWARD: Final = Limits(left=frozenset({BIAS}))


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


def rules(
    kernel: KernelRow, dims: tuple[int, int], backward: Limits = BACKWARD
) -> tuple[Rule, ...]:
    """The families of a kernel for calls of these head dims, the one asked first leading."""
    limits = backward if kernel.op == _BACKWARD else Limits()
    if kernel.family != _BOTH:
        return (Rule(MMA_SYNC, "every call"),)
    if any(_beyond(limits, kernel, dims)):
        return (Rule(MMA_SYNC, f"every call: the wgmma backward serves {_served(limits)}"),)
    left = [one for one in _SPECIAL if one in limits.left]
    but = f"; not with {', '.join(left)}" if left else ""
    return (
        Rule(WGMMA, f"rows start on 16 bytes, so that TMA can address them{but}"),
        Rule(MMA_SYNC, "every other call"),
    )


def choose(
    kernel: KernelRow,
    dims: tuple[int, int],
    tensors: Iterable[Rows],
    special: Iterable[str],
    backward: Limits = BACKWARD,
) -> Choice:
    """What a call takes.

    `dims` are the call's head dims, `special` what it has beside plain dense attention.
    """
    misplaced = unaligned(tensors)
    if kernel.family != _BOTH:
        how = "16 bytes at a time" if misplaced is None else f"in smaller pieces, for {misplaced}"
        return Choice(MMA_SYNC, f"rows are read {how}")
    limits = backward if kernel.op == _BACKWARD else Limits()
    obstacles = [
        *_beyond(limits, kernel, dims),
        *(f"the wgmma backward does not serve {one}" for one in special if one in limits.left),
        *([] if misplaced is None else [f"TMA cannot address rows of {misplaced}"]),
    ]
    if obstacles:
        return Choice(MMA_SYNC, obstacles[0])
    return Choice(WGMMA, "every row starts on 16 bytes, so TMA can address it")


def unaligned(tensors: Iterable[Rows]) -> str | None:
    """The first tensor with a row that starts between two pieces, and why; None without one."""
    for rows in tensors:
        if beyond := rows.address % _PIECE:
            # Not the address itself: what the log said once it need not say of the next tensor.
            return f"{rows.name}: its address is {beyond} bytes beyond a multiple of {_PIECE}"
        for name in ("batch", "sequence", "heads"):
            stride = getattr(rows, name)
            if stride % _STEP:
                return f"{rows.name}: its {name} stride, {stride}, is no multiple of {_STEP}"
    return None


def _beyond(limits: Limits, kernel: KernelRow, dims: tuple[int, int]) -> Iterator[str]:
    """Why a dtype or a head dim is left to the other family, whatever the tensors are."""
    dtype = limits.dtypes is None or kernel.dtype in limits.dtypes
    head_dim = limits.head_dims is None or kernel.head_dim in limits.head_dims
    pair = limits.pairs or kernel.head_dim == kernel.head_dim_v
    if not (dtype and head_dim and pair):
        asked = f"{kernel.dtype} {kernel.dim_words}"
        yield f"the wgmma backward serves {_served(limits)}, not {asked}"
    if not limits.filled and dims != kernel.dims:
        yield f"the wgmma backward does not fill up head dims, as {kernel.dim_words} would have to"


def _served(limits: Limits) -> str:
    """Dtypes and head dims in words."""
    words = []
    if limits.dtypes is not None:
        words.append(", ".join(sorted(limits.dtypes)))
    if limits.head_dims is not None:
        words.append(f"head dims {', '.join(map(str, sorted(limits.head_dims)))}")
    elif not limits.pairs:
        words.append("values of the same head dim")
    exactly = "" if limits.filled else " exactly"
    return ", ".join(words) + exactly
