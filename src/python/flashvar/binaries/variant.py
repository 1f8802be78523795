"""What one binary is compiled for: an architecture, and the kernels in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# A point is of numbers alone.
_SPELLING = re.compile(
    r"(?:sm_?(?!\d+\.))?(?P<major>[1-9][0-9]*)\.?(?P<minor>[0-9])(?P<specific>a?)", re.ASCII
)

_DIM = re.compile(r"([a-z])[a-z0-9]*(?:_[a-z0-9]+)*_dim")
# The second integer of a pair stands right behind the first, under its axis with this at the end.
SECOND: Final = "_v"


def short_axis(axis: str) -> str:
    """What names print, and commands take, for an axis: `hdim` for `head_dim`, others in full."""
    match = _DIM.fullmatch(axis)
    return axis if match is None else f"{match[1]}dim"


def pair_words(first: int, second: int) -> str:
    """`64`, or `192x128` of two that differ: as commands and people write them."""
    return f"{first}" if first == second else f"{first}x{second}"


@dataclass(frozen=True, order=True)
class Architecture:
    """A compute capability, as the compiler names it.

    Architecture-specific code (a trailing `a` in `code`) runs on exactly its own capability;
    other code also runs on higher minors of the same major.
    """

    major: int
    minor: int
    specific: bool = False

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Read `sm_XY`, `smXY`, `XY` or `X.Y`, with an optional `a`; ValueError on others."""
        match = _SPELLING.fullmatch(text)
        if match is None:
            raise ValueError(f"expected an architecture such as sm_XY or XYa, got {text!r}")
        return cls(int(match["major"]), int(match["minor"]), bool(match["specific"]))

    @property
    def name(self) -> str:
        """`sm_XY`: what users and files call it."""
        return f"sm_{self.major}{self.minor}"

    @property
    def code(self) -> str:
        """`XY` or `XYa`: what the compiler is told."""
        return f"{self.major}{self.minor}{'a' if self.specific else ''}"

    @property
    def extra(self) -> str:
        """`smXY`: the extra of the flashvar distribution that installs it."""
        return f"sm{self.major}{self.minor}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """What people call it, `name` first."""
        plain = (self.name, self.extra, self.extra[2:], f"{self.major}.{self.minor}")
        return (*plain, *(f"{start}{self.code}" for start in ("sm_", "sm", "") if self.specific))

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor), as `torch.cuda.get_device_capability` reports it."""
        return (self.major, self.minor)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether machine code for it loads on a device of `capability`."""
        if self.specific:
            return self.capability == capability
        return self.major == capability[0] and self.minor <= capability[1]


@dataclass(frozen=True)
class Kernel:
    """One compiled instance of an op: a value for each of the op's axes, in the op's order.

    Where an axis has a pair of integers, (axis, first) is followed by (axis + SECOND, second).
    """

    op: str
    axes: tuple[tuple[str, str | int], ...]

    @property
    def name(self) -> str:
        """`<op>_<value>...`; integer values carry their axis, e.g. `hdim64`, `hdim192x128`."""
        return "_".join((self.op, *self.words.values()))

    @property
    def words(self) -> dict[str, str]:
        """The value of each axis as names spell it: `bf16`, `hdim64`, `hdim192x128`."""
        named = {axis for axis, value in self.axes if isinstance(value, str)}
        return {
            axis: value if axis in named else f"{short_axis(axis)}{value}"
            for axis, value in self.values.items()
        }

    @property
    def values(self) -> dict[str, str]:
        """The value of each axis as commands say it: `bf16`, `64`, `192x128`."""
        said: dict[str, str] = {}
        before = None
        for axis, value in self.axes:
            if before is not None and axis == before + SECOND and isinstance(value, int):
                said[before] += f"x{value}"
            else:
                said[axis] = str(value)
            before = None if isinstance(value, str) else axis
        return said

    def axis(self, name: str) -> str | int:
        """The value of the axis `name`; KeyError when the op has no such axis."""
        return dict(self.axes)[name]
