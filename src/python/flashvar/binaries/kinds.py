"""The architecture and the driver that a binary is for, and the names of its kernels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# A dot is allowed only in plain numbers: `9.0`, not `sm_9.0`.
_PATTERN = re.compile(
    r"(?:sm_?(?!\d+\.))?(?P<major>[1-9][0-9]*)\.?(?P<minor>[0-9])(?P<specific>a?)", re.ASCII
)

# The capabilities of GPUs inside a Tegra chip (Jetson, DRIVE). Machine code is compatible neither
# between them and other GPUs nor among them (CUDA C++ Programming Guide, binary compatibility).
TEGRA: Final = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)})
# The CUDA major of binaries whose names have none.
CUDA: Final = 13

_OLDER = re.compile(r"(?P<architecture>.+)-cu(?P<cuda>[1-9][0-9]*)", re.ASCII)

_DIM = re.compile(r"([a-z])[a-z0-9]*(?:_[a-z0-9]+)*_dim")
# The second integer of a pair follows the first, with this suffix appended to the axis name.
SECOND: Final = "_v"


def short_axis(axis: str) -> str:
    """The name of an axis in kernel names and commands: `rdim` for `row_dim`, others in full."""
    match = _DIM.fullmatch(axis)
    return axis if match is None else f"{match[1]}dim"


def pair_text(first: int, second: int) -> str:
    """The text of a pair in messages and commands: `64` if both are equal, else `192x128`."""
    return f"{first}" if first == second else f"{first}x{second}"


def joined(axes: Iterable[tuple[str, str | int]]) -> dict[str, str | int | tuple[int, int]]:
    """The value of each axis; the integers of a pair, which follow each other, are one tuple."""
    found: dict[str, str | int | tuple[int, int]] = {}
    last = ""
    for axis, value in axes:
        before = found.get(last)
        if axis == last + SECOND and isinstance(before, int) and isinstance(value, int):
            found[last] = before, value
        else:
            found[axis] = value
            last = axis
    return found


def dotted(version: Iterable[int]) -> str:
    """The text of a version, e.g. `12.4`."""
    return ".".join(map(str, version))


@dataclass(frozen=True, order=True)
class Architecture:
    """A compute capability, as in the compiler's names.

    Architecture-specific code (a trailing `a` in `code`) and code for Tegra run on exactly their
    own capability; other code also runs on later minor versions of the same major version, but not
    on Tegra.
    """

    major: int
    minor: int
    specific: bool = False

    @classmethod
    def parse(cls, text: str) -> Architecture:
        """Read `sm_XY`, `smXY`, `XY` or `X.Y`, with an optional `a`; ValueError on others."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"expected an architecture such as sm_89 or 8.9, found {text!r}")
        return cls(int(match["major"]), int(match["minor"]), bool(match["specific"]))

    @property
    def name(self) -> str:
        """`sm_XY`: the name for users and in files."""
        return f"sm_{self.major}{self.minor}"

    @property
    def code(self) -> str:
        """`XY` or `XYa`: the compiler's argument."""
        return f"{self.major}{self.minor}{'a' if self.specific else ''}"

    @property
    def extra(self) -> str:
        """`smXY`: the extra of flashvar that installs its binary."""
        return f"sm{self.major}{self.minor}"

    @property
    def spellings(self) -> tuple[str, ...]:
        """The usual names of the architecture, `name` first."""
        plain = (self.name, self.extra, self.extra[2:], f"{self.major}.{self.minor}")
        return (*plain, *(f"{start}{self.code}" for start in ("sm_", "sm", "") if self.specific))

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor), as `torch.cuda.get_device_capability` reports it."""
        return (self.major, self.minor)

    @property
    def exact(self) -> bool:
        """Whether the code runs on its own capability alone."""
        return self.specific or self.capability in TEGRA

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether machine code for the architecture runs on a device of `capability`."""
        if self.exact or capability in TEGRA:
            return self.capability == capability
        return self.major == capability[0] and self.minor <= capability[1]


@dataclass(frozen=True, order=True)
class BinaryKind:
    """An architecture, and the oldest CUDA major whose drivers run the binary."""

    architecture: Architecture
    cuda: int = CUDA

    @classmethod
    def parse(cls, text: str) -> BinaryKind:
        """Read an architecture, or one with `-cuN` behind it; ValueError on others."""
        match = _OLDER.fullmatch(text)
        if match is None:
            return cls(Architecture.parse(text))
        return cls(Architecture.parse(match["architecture"]), int(match["cuda"]))

    @property
    def name(self) -> str:
        """`sm_XY`, `sm_XY-cuN`: the name for users, of entry points and of targets."""
        return self.architecture.name + self._suffix

    @property
    def extra(self) -> str:
        """`smXY`, `smXY-cuN`: the extra of flashvar that installs the binary."""
        return self.architecture.extra + self._suffix

    @property
    def spellings(self) -> tuple[str, ...]:
        """The usual names of the binary, `name` first."""
        return tuple(spelling + self._suffix for spelling in self.architecture.spellings)

    @property
    def _suffix(self) -> str:
        return "" if self.cuda == CUDA else f"-cu{self.cuda}"

    def runs_with(self, driver: tuple[int, int] | None) -> bool:
        """Whether a driver that supports this CUDA version loads machine code of the binary."""
        return driver is not None and driver >= (self.cuda, 0)


@dataclass(frozen=True)
class Kernel:
    """One compiled instance of a function: a value for each of its axes, in their order.

    Where an axis has a pair of integers, (axis, first) is followed by (axis + SECOND, second).
    """

    function: str  # the key "op" of files
    axes: tuple[tuple[str, str | int], ...]

    @property
    def name(self) -> str:
        """`<function>_<value>...`; integers follow their axis: `rdim64`, `rdim192x128`."""
        return "_".join((self.function, *self.words.values()))

    @property
    def words(self) -> dict[str, str]:
        """The value of each axis as in kernel names: `bf16`, `rdim64`, `rdim192x128`."""
        named = {axis for axis, value in self.axes if isinstance(value, str)}
        return {
            axis: value if axis in named else f"{short_axis(axis)}{value}"
            for axis, value in self.values.items()
        }

    @property
    def values(self) -> dict[str, str]:
        """The value of each axis as in commands: `bf16`, `64`, `192x128`."""
        return {
            axis: "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for axis, value in joined(self.axes).items()
        }

    def axis(self, name: str) -> str | int:
        """The value of the axis `name`; KeyError when the function has no such axis."""
        return dict(self.axes)[name]
