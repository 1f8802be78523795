"""Over which values may an op be compiled? Reads [ops]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashvar.errors import ConfigurationError
from flashvar_factory import names
from flashvar_factory.spelling import listed
from flashvar_factory.toml_table import Table, Value


@dataclass(frozen=True)
class Axis:
    """One dimension an op is compiled over: named choices, or integers in steps."""

    name: str
    choices: tuple[str, ...] = ()
    integers: range = range(0)

    def accepts(self, value: Value) -> bool:
        """Whether a kernel may be compiled for `value`."""
        return value in self.choices if isinstance(value, str) else value in self.integers

    @property
    def spellings(self) -> Mapping[str, Value]:
        """Every value that a kernel may be compiled for, by how a command says it."""
        return {str(value): value for value in self.choices or self.integers}

    def __str__(self) -> str:
        if self.choices:
            return f"one of {listed(self.choices)}"
        steps = self.integers
        return f"an integer from {steps[0]} to {steps[-1]} in steps of {steps.step}"


@dataclass(frozen=True)
class Op:
    """One operation and its axes, in the order of its C++ template's parameters."""

    name: str
    axes: tuple[Axis, ...]

    @property
    def camel(self) -> str:
        """The C++ spelling: `AttentionFwd` of attention_fwd."""
        return "".join(word.capitalize() for word in self.name.split("_"))


def read(tables: Sequence[tuple[str, Table]]) -> dict[str, Op]:
    """The ops of the tables of [ops], by name."""
    ops = [name for name, _ in tables]
    return {name: _op(name, table, ops) for name, table in tables}


def _op(name: str, table: Table, ops: Sequence[str]) -> Op:
    _check_name(table, name, names.why_not(name))
    axes = table.table("axes")
    op = Op(name, tuple(_axis(axis, axes.table(axis), ops) for axis in list(axes.rest)))
    table.end()
    return op


def _axis(name: str, table: Table, ops: Sequence[str]) -> Axis:
    _check_name(table, name, names.why_no_axis(name, ops))
    if "choices" in table.rest:
        choices = table.words("choices")
        table.end()
        return Axis(name, choices=choices)
    low, high, step = (table.positive(key) for key in ("min", "max", "step"))
    table.end(also=["choices"])
    if high < low:
        raise table.wrong("max", f"at least min, {low}", high)
    return Axis(name, integers=range(low, high + 1, step))


def _check_name(table: Table, name: str, expected: str | None) -> None:
    if expected is not None:
        raise ConfigurationError(f"{table.path(None)}: expected {expected}, found {name!r}")
