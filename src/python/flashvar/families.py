"""Which family of kernels inside a binary a call takes, and why.

The binary decides this itself at every call (`src/cuda/sm90/attention/*_launch.cuh`); here is
the same rule in words, for doctor and for the log. Pure, and it sees no tensor: addresses and
strides alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from flashvar.manifest import KernelRow

WGMMA: Final = "wgmma"
MMA_SYNC: Final = "mma.sync"
# The folder of a kernel's sources, which its manifest names: those that hold both families.
SM90: Final = "sm90"

# TMA, which feeds the wgmma kernels, addresses memory in pieces of this many bytes.
_PIECE: Final = 16
_ELEMENT: Final = 2  # bytes of bf16 and fp16
_STEP: Final = _PIECE // _ELEMENT

# What a call may have beside plain dense attention, in the order in which words name it.
PACKED: Final = "packed sequences"
SHORT: Final = "packed sequences of fewer than 32 queries on average"
FEWEST_ROWS: Final = 32
BIAS: Final = "a bias"
FEATURES: Final = (BIAS, "ALiBi slopes", "softcap", "dropout")
DETERMINISTIC: Final = "deterministic gradients"
_SPECIAL: Final = (PACKED, SHORT, *FEATURES, DETERMINISTIC)


# What a wgmma kernel leaves to the other family: `supports_shape` of its launcher in
# src/cuda/sm90/, which tests/unit/test_families.py compares.
LEFT: Final = {"attention_bwd": frozenset({SHORT, BIAS})}


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


def rules(kernel: KernelRow) -> tuple[Rule, ...]:
    """The families of a kernel, the one asked first leading."""
    if kernel.family != SM90:
        return (Rule(MMA_SYNC, "every call"),)
    left = [one for one in _SPECIAL if one in LEFT.get(kernel.op, ())]
    but = f"; not with {', '.join(left)}" if left else ""
    return (
        Rule(WGMMA, f"rows start on 16 bytes, so that TMA can address them{but}"),
        Rule(MMA_SYNC, "every other call"),
    )


def choose(kernel: KernelRow, tensors: Iterable[Rows], special: Iterable[str]) -> Choice:
    """What a call takes; `special` is what it has beside plain dense attention."""
    misplaced = unaligned(tensors)
    if kernel.family != SM90:
        how = "16 bytes at a time" if misplaced is None else f"in smaller pieces, for {misplaced}"
        return Choice(MMA_SYNC, f"rows are read {how}")
    for one in special:
        if one in LEFT.get(kernel.op, ()):
            return Choice(MMA_SYNC, f"the wgmma backward does not serve {one}")
    if misplaced is not None:
        return Choice(MMA_SYNC, f"TMA cannot address rows of {misplaced}")
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
