"""The parts of version labels: one text for each function, and for each value of each axis.

A value stands for itself, `bf16`, or follows the short name of its axis, `hdim64`. The values of an
axis follow its name in full, `weightdtypefp32`, where one of them would be a part of another
meaning too. Parts are without the underscores of names, because versions know none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from flashvar.binaries.kinds import Kernel, short_axis
from flashvar.errors import ConfigurationError
from flashvar_factory.config.axes import Op

PTX: Final = "ptx"
# What follows the name of an axis of integers, and what a longer such name may go on with.
_INTEGERS: Final = re.compile(r"[0-9]+(x[0-9]+)?", re.ASCII)
_BEGUN: Final = re.compile(r"([0-9]+(x[0-9]*)?)?", re.ASCII)


@dataclass(frozen=True)
class _Parts:
    """The parts of one axis, or of functions and PTX: texts, and names that integers follow."""

    meaning: str
    texts: frozenset[str]
    before_integers: frozenset[str] = frozenset()

    def shared_with(self, other: _Parts) -> str | None:
        """A part, or the beginning of one, that both have."""
        for one, two in ((self, other), (other, self)):
            for text in sorted(one.texts):
                if text in two.texts or any(
                    text.startswith(name) and _INTEGERS.fullmatch(text[len(name) :])
                    for name in two.before_integers
                ):
                    return text
            for longer in sorted(one.before_integers):
                for name in two.before_integers:
                    if longer.startswith(name) and _BEGUN.fullmatch(longer[len(name) :]):
                        return longer
        return None


def of_function(function: str) -> str:
    """The part of a function."""
    return function.replace("_", "")


def of_value(kernel: Kernel, axis: str, in_full: frozenset[str]) -> str:
    """The part of the value that a kernel has on an axis, after its name for those `in_full`."""
    word = f"{axis}{kernel.values[axis]}" if axis in in_full else kernel.words[axis]
    return word.replace("_", "")


def in_full(ops: Mapping[str, Op]) -> frozenset[str]:
    """The axes whose values follow their name."""
    fixed, axes = _fixed(ops), sorted({axis.name for op in ops.values() for axis in op.axes})
    plain = {axis: _of_axis(axis, ops, in_full=False) for axis in axes}
    return frozenset(
        axis
        for axis in axes
        if any(
            plain[axis].shared_with(other)
            for other in (*fixed, *(plain[name] for name in axes if name != axis))
        )
    )


def check(ops: Mapping[str, Op], where: str) -> None:
    """ConfigurationError where a part would have two meanings: two builds would have one label."""
    named = in_full(ops)
    axes = dict.fromkeys(axis.name for op in ops.values() for axis in op.axes)
    parts = [*_fixed(ops), *(_of_axis(axis, ops, in_full=axis in named) for axis in axes)]
    for number, one in enumerate(parts):
        for other in parts[:number]:
            if (shared := one.shared_with(other)) is not None:
                raise ConfigurationError(
                    f"{where}: expected names that the labels of versions tell apart, found "
                    f"{shared} for {other.meaning} and for {one.meaning}; rename one"
                )


def _fixed(ops: Iterable[str]) -> list[_Parts]:
    """The parts that have one text alone."""
    functions = [_Parts(f"the function {op}", frozenset((of_function(op),))) for op in ops]
    return [_Parts("PTX", frozenset((PTX,))), *functions]


def _of_axis(name: str, ops: Mapping[str, Op], *, in_full: bool) -> _Parts:
    """The parts of an axis, which several ops may have with different values."""
    axes = [axis for op in ops.values() for axis in op.axes if axis.name == name]
    choices = {choice for axis in axes for choice in axis.choices}
    texts = {f"{name}{choice}" if in_full else choice for choice in choices}
    integers = any(axis.integers for axis in axes)
    before = {name if in_full else short_axis(name)} if integers else set()
    return _Parts(
        f"the axis {name}",
        frozenset(text.replace("_", "") for text in texts),
        frozenset(text.replace("_", "") for text in before),
    )
