"""The axes an op is compiled over, the values they take, what kernels may spill: reads [ops]."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flashvar.binaries.kinds import SECOND, Kernel
from flashvar.errors import ConfigurationError
from flashvar_factory.config import names
from flashvar_factory.config.suggestions import listed
from flashvar_factory.config.toml_table import Table, Value

# Kernels are compiled for some of an axis's values; more than this is a mistake.
_MOST_VALUES = 65_536
_SPILLS = "spill_bytes"
_LAUNCHER = r"([a-z][a-z0-9_]*/)*[a-z][a-z0-9_]*"
# Few enough digits for int(), which refuses thousands.
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_PAIR = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", re.ASCII)


@dataclass(frozen=True)
class BuildAxis:
    """One dimension an op is compiled over: named choices, or integers in steps.

    With `pairs` a kernel may have two different integers instead of one; their value is the text
    "192x128", and a kernel has them under the axis and under its name with `_v` behind.
    """

    name: str
    choices: tuple[str, ...] = ()
    integers: range = range(0)
    pairs: bool = False

    def accepts(self, value: Value) -> bool:
        """Whether a kernel may be compiled for `value`."""
        if self.choices or not isinstance(value, str):
            return value in (self.choices or self.integers)
        two = set(_numbers(value)).intersection(self.integers)
        return self.pairs and len(two) == 2

    def parse(self, word: str) -> Value | None:
        """The value that a command means by `word`; None where no kernel may be compiled for it."""
        value = int(word) if _NUMBER.fullmatch(word) else word
        return value if str(value) == word and self.accepts(value) else None

    def is_number(self, word: str) -> bool:
        """Whether `word` is a number or a pair, where integers are values."""
        return not self.choices and bool(_asked(word))

    def enough(self, word: str) -> Value | None:
        """The least value that holds the number or the pair `word`; None where none does."""
        held = [min((one for one in self.integers if one >= n), default=None) for n in _asked(word)]
        values = [one for one in held if one is not None]
        if not values or len(values) < len(held):
            return None
        if len(set(values)) == 1:
            return values[0]
        return "x".join(map(str, values)) if self.pairs else None

    def rank(self, value: Value) -> tuple[int, ...]:
        """Orders the values that are accepted."""
        if isinstance(value, str):
            return (self.choices.index(value),) if self.choices else _numbers(value)
        return (value,)

    def entries(self, value: Value) -> tuple[tuple[str, Value], ...]:
        """The axes of a kernel of `value`, with its values: two of them for a pair."""
        if self.choices or not isinstance(value, str):
            return ((self.name, value),)
        return tuple(zip((self.name, self.name + SECOND), _numbers(value), strict=True))

    @property
    def spellings(self) -> tuple[str, ...]:
        """How commands write the values, pairs left out."""
        return tuple(str(value) for value in self.choices or self.integers)

    def __str__(self) -> str:
        if self.choices:
            return f"one of {listed(self.choices)}"
        steps = self.integers
        pairs = f', or two different ones as "{steps[-1]}x{steps[0]}"' if self.pairs else ""
        return f"an integer from {steps[0]} to {steps[-1]} in steps of {steps.step}{pairs}"


def _asked(word: str) -> tuple[int, ...]:
    """The number or the pair that a word is; none of any other."""
    return (int(word),) if _NUMBER.fullmatch(word) else _numbers(word)


def _numbers(value: str) -> tuple[int, ...]:
    """The integers of a pair; none of any other text."""
    match = _PAIR.fullmatch(value)
    return () if match is None else (int(match[1]), int(match[2]))


@dataclass(frozen=True)
class SpillBudget:
    """Bytes of registers that a thread of a released kernel may spill.

    The same for every kernel, or by the value of one axis, as commands write it; kernels of other
    values may spill nothing.
    """

    every: int = 0
    axis: str | None = None
    by_value: Mapping[str, int] = field(default_factory=dict)

    def of(self, kernel: Kernel) -> int:
        """What a thread of `kernel` may spill."""
        if self.axis is None:
            return self.every
        return self.by_value.get(kernel.values.get(self.axis, ""), 0)

    def key(self, kernel: Kernel) -> str:
        """The key in [ops.<function>] of variants.toml that sets the budget of `kernel`."""
        if self.axis is None:
            return _SPILLS
        return f"{_SPILLS}.{self.axis}.{kernel.values.get(self.axis)}"


@dataclass(frozen=True)
class Op:
    """One operation and its axes, in the order of its C++ template's parameters."""

    name: str
    axes: tuple[BuildAxis, ...]
    launcher: str  # the header in a family's folder that launches it, without its suffix
    budget: SpillBudget

    @property
    def camel(self) -> str:
        """The C++ spelling: `AttentionFwd` of attention_fwd."""
        return _camel(self.name)

    @property
    def launcher_class(self) -> str:
        """The C++ class of the launcher, in the family's namespace: `attention::FwdLaunch`."""
        *folders, stem = self.launcher.split("/")
        return "::".join([*folders, _camel(stem)])


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def read(tables: Sequence[tuple[str, Table]]) -> dict[str, Op]:
    """The ops of the tables of [ops], by name."""
    ops = [name for name, _ in tables]
    found = {name: _op(name, table, ops) for name, table in tables}
    camel = {op.camel: name for name, op in found.items()}  # the last of each
    for name, table in tables:
        if (other := camel[found[name].camel]) != name:
            expected = f"functions that differ in C++, where both are {found[name].camel}"
            raise table.wrong(None, expected, f"{name} and {other}")
    return found


def _op(name: str, table: Table, ops: Sequence[str]) -> Op:
    _check_name(table, name, names.why_not(name))
    axes = table.table("axes")
    there = list(axes.rest)
    launcher = (
        table.text("launcher", _LAUNCHER, "a header such as 'attention/fwd_launch'")
        if "launcher" in table.rest
        else f"{name}_launch"
    )
    read = tuple(_axis(axis, axes.table(axis), ops) for axis in there)
    op = Op(name, read, launcher, _budget(table, read))
    for axis in op.axes:
        if axis.pairs and axis.name + SECOND in there:
            expected = f"another name than that of the second integer of {axis.name}'s pairs"
            raise axes.wrong(axis.name + SECOND, expected, axis.name + SECOND)
    table.end(also=["launcher", _SPILLS])
    return op


def _budget(table: Table, axes: Sequence[BuildAxis]) -> SpillBudget:
    """What is under `spill_bytes`: an integer, or { <axis> = { <value> = integer } }."""
    if _SPILLS not in table.rest:
        return SpillBudget()
    if not isinstance(table.rest[_SPILLS], dict):
        return SpillBudget(table.positive(_SPILLS, "a table of them by the values of one axis"))
    by_axis = table.table(_SPILLS)
    named = [axis for axis in axes if axis.name in by_axis.rest]
    if len(named) != 1 and len(by_axis.rest) == len(named):
        expected = f"one axis, {listed([axis.name for axis in axes])}"
        raise by_axis.wrong(None, expected, sorted(by_axis.rest))
    by_value = {axis: by_axis.table(axis.name) for axis in named}
    by_axis.end(also=[axis.name for axis in axes])
    ((axis, values),) = by_value.items()
    words = list(values.rest)
    if not words:
        raise values.wrong(None, f"a value of {axis.name} and its bytes", {})
    for word in words:
        if axis.parse(word) is None:
            raise values.wrong(word, f"{axis}, with its bytes behind it", word)
    return SpillBudget(axis=axis.name, by_value={word: values.positive(word) for word in words})


def _axis(name: str, table: Table, ops: Sequence[str]) -> BuildAxis:
    _check_name(table, name, names.why_no_axis(name, ops))
    if "choices" in table.rest:
        choices = table.names("choices")
        if len({choice.replace("_", "") for choice in choices}) < len(choices):
            expected = "names that differ in more than _, which versions leave out"
            raise table.wrong("choices", expected, list(choices))
        table.end()
        return BuildAxis(name, choices=choices)
    low, high, step = (table.positive(key) for key in ("min", "max", "step"))
    pairs = "pairs" in table.rest and table.flag("pairs")
    table.end(also=["choices", "pairs"])
    if high < low:
        raise table.wrong("max", f"at least min, {low}", high)
    integers = range(low, high + 1, step)
    if len(integers) > _MOST_VALUES:
        raise table.wrong("max", f"at most {_MOST_VALUES:,} values of an axis", len(integers))
    if pairs and len(integers) < 2:
        raise table.wrong("pairs", "at least two integers to pair", len(integers))
    return BuildAxis(name, integers=integers, pairs=pairs)


def _check_name(table: Table, name: str, expected: str | None) -> None:
    if expected is not None:
        raise ConfigurationError(f"{table.path(None)}: expected {expected}, found {name!r}")
