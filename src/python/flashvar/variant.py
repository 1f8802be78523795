"""What one binary is compiled for: an architecture, and the kernels in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_SPELLING = re.compile(r"(?:sm_?)?(?P<major>[1-9][0-9]*)(?P<minor>[0-9])(?P<specific>a?)")

# Axes that names print, and commands take, shorter than they are called; others go as they are.
SHORT_AXES: Final = MappingProxyType({"head_dim": "hdim"})


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
        """Read `sm_XY`, `smXY` or `XY`, each with an optional `a`; ValueError on anything else."""
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
    def capability(self) -> tuple[int, int]:
        """(major, minor), as `torch.cuda.get_device_capability` reports it."""
        return (self.major, self.minor)


@dataclass(frozen=True)
class Kernel:
    """One compiled instance of an op: a value for each of the op's axes, in the op's order."""

    op: str
    axes: tuple[tuple[str, str | int], ...]

    @property
    def name(self) -> str:
        """`<op>_<value>...`; integer values carry their axis, e.g. `hdim64`."""
        words = (
            value if isinstance(value, str) else f"{SHORT_AXES.get(axis, axis)}{value}"
            for axis, value in self.axes
        )
        return "_".join((self.op, *words))

    def axis(self, name: str) -> str | int:
        """The value of the axis `name`; KeyError when the op has no such axis."""
        return dict(self.axes)[name]
