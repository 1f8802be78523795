"""What does `variants.toml` say? Its one reader: strict, and everything else gets results.

An op declares the axes it is compiled over; `defaults` gives each axis its values; an architecture
says what the compiler is told and which distribution carries the binary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flashvar.errors import ConfigurationError
from flashvar.variant import Architecture
from flashvar_factory.spelling import did_you_mean, listed
from flashvar_factory.toml_table import Table, Value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME: Final = "variants.toml"
SCHEMA: Final = 1

_WORD = r"[a-z][a-z0-9_]*"
_WORD_MEANING = "a word of a-z, 0-9 and _"
_DISTRIBUTION = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"


@dataclass(frozen=True)
class Project:
    """Whose kernels these are."""

    name: str  # of the C++ namespace, of the files and of the entry-point group
    version_file: str  # relative to variants.toml; holds `__version__ = "..."`
    license: str  # SPDX expression of the binary distributions


@dataclass(frozen=True)
class Axis:
    """One dimension an op is compiled over: named choices, or integers in steps."""

    name: str
    choices: tuple[str, ...] = ()
    integers: range = range(0)

    def accepts(self, value: Value) -> bool:
        """Whether a kernel may be compiled for `value`."""
        return value in self.choices if isinstance(value, str) else value in self.integers

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


@dataclass(frozen=True)
class Target:
    """One architecture that binaries are made for."""

    architecture: Architecture
    family: str  # the folder of the CUDA sources that serves it
    shared_memory: int  # bytes a block may have
    distribution: str


@dataclass(frozen=True)
class Dev:
    """What a development build takes where the selection says nothing."""

    architecture: str
    axes: Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Config:
    """A whole `variants.toml`."""

    project: Project
    ops: Mapping[str, Op]  # every declared op
    default_ops: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]  # axis -> values compiled by default
    targets: Mapping[str, Target]  # by architecture name, in the file's order
    dev: Dev


def read(path: Path) -> Config:
    """Read `variants.toml`; ConfigurationError that names the key on anything off."""
    try:
        return parse(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: expected a readable file, found: {error}") from error


def parse(text: str, file: str = FILE_NAME) -> Config:
    """Check every key of the document and return it."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file}: expected TOML, found: {error}") from error
    top = Table(document, "", file)
    schema = top.take("schema")
    if schema != SCHEMA:
        raise top.wrong("schema", str(SCHEMA), schema)
    project = _project(top.table("project"))
    ops = {name: _op(name, table) for name, table in _tables(top, "ops")}
    default_ops, axes = _defaults(top.table("defaults"), ops)
    targets = _targets(top)
    dev = _dev(top.table("dev"), axes, targets)
    top.end()
    return Config(
        project,
        MappingProxyType(ops),
        default_ops,
        MappingProxyType(axes),
        MappingProxyType(targets),
        dev,
    )


def _project(table: Table) -> Project:
    project = Project(
        name=table.text("name", _WORD, _WORD_MEANING),
        version_file=table.text("version_file", r"[^/].*", "a path relative to this file"),
        license=table.text("license", r"\S(.*\S)?", "an SPDX expression"),
    )
    table.end()
    return project


def _tables(top: Table, key: str) -> list[tuple[str, Table]]:
    parent = top.table(key)
    if not parent.rest:
        raise top.wrong(key, "at least one entry", {})
    return [(name, parent.table(name)) for name in list(parent.rest)]


def _op(name: str, table: Table) -> Op:
    _check_word(table, name)
    axes = table.table("axes")
    op = Op(name, tuple(_axis(axis, axes.table(axis)) for axis in list(axes.rest)))
    table.end()
    return op


def _axis(name: str, table: Table) -> Axis:
    _check_word(table, name)
    if "choices" in table.rest:
        choices = table.values("choices")
        words = tuple(value for value in choices if isinstance(value, str))
        if len(words) != len(choices):
            raise table.wrong("choices", "strings", choices)
        table.end()
        return Axis(name, choices=words)
    low, high, step = (table.positive(key) for key in ("min", "max", "step"))
    table.end(also=["choices"])
    if high < low:
        raise table.wrong("max", f"at least min, {low}", high)
    return Axis(name, integers=range(low, high + 1, step))


def _check_word(table: Table, name: str) -> None:
    if not name.isidentifier() or name != name.lower():
        raise ConfigurationError(f"{table.path(None)}: expected {_WORD_MEANING}, found {name!r}")


def _defaults(
    table: Table, ops: Mapping[str, Op]
) -> tuple[tuple[str, ...], dict[str, tuple[Value, ...]]]:
    default_ops = table.values("ops")
    for op in default_ops:
        if op not in ops:
            hint = did_you_mean(str(op), ops)
            raise ConfigurationError(
                f"{table.path('ops')}: unknown op {op!r}, expected {listed(ops)}{hint}"
            )
    axes: dict[str, tuple[Value, ...]] = {}
    for axis in (axis for op in ops.values() for axis in op.axes):
        values = axes[axis.name] if axis.name in axes else table.values(axis.name)
        for value in values:
            if not axis.accepts(value):
                raise table.wrong(axis.name, str(axis), value)
        axes[axis.name] = values
    table.end()
    return tuple(str(op) for op in default_ops), axes


def _targets(top: Table) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    for name, table in _tables(top, "architectures"):
        code = table.text("code", r"[1-9][0-9]+a?", "a compute capability such as '90a'")
        architecture = Architecture.parse(code)
        if architecture.name != name:
            raise table.wrong("code", f"the code of {name}", code)
        target = Target(
            architecture,
            family=table.text("family", _WORD, _WORD_MEANING),
            shared_memory=table.positive("shared_memory"),
            distribution=table.text("distribution", _DISTRIBUTION, "a distribution name"),
        )
        if target.distribution in {other.distribution for other in targets.values()}:
            raise table.wrong("distribution", "another name each", target.distribution)
        targets[name] = target
        table.end()
    return targets


def _dev(table: Table, axes: Mapping[str, tuple[Value, ...]], targets: Mapping[str, Target]) -> Dev:
    architecture = table.text("architecture", r".+", "the name of an architecture")
    if architecture not in targets:
        raise ConfigurationError(
            f"{table.path('architecture')}: unknown architecture {architecture!r}, expected "
            f"{listed(targets)}{did_you_mean(architecture, targets)}"
        )
    chosen: dict[str, tuple[Value, ...]] = {}
    for axis in [axis for axis in axes if axis in table.rest]:
        chosen[axis] = table.values(axis)
        for value in chosen[axis]:
            if value not in axes[axis]:
                raise table.wrong(axis, f"values of defaults.{axis} ({listed(axes[axis])})", value)
    table.end(also=axes)
    return Dev(architecture, MappingProxyType(chosen))
