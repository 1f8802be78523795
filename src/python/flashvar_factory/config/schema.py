"""The one reader of `variants.toml`: strict; all other modules take its result.

Each function has a table in `ops`, which declares the axes it is compiled over. `defaults` has the
values of each axis, `defaults.<function>` those of one function. An architecture has the code that
is passed to the compiler, and the distribution with the binary. With `toolkits` an
architecture has more targets: one for each older CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from flashvar.binaries.kinds import CUDA, Architecture, BinaryKind
from flashvar.binaries.manifest import RAN
from flashvar.errors import ConfigurationError
from flashvar_factory.config import (
    axes,
    families,
    labels,
    names,
    older_toolkits,
    toml_table,
    torch_coupling,
)
from flashvar_factory.config.axes import BuildAxis, Op
from flashvar_factory.config.families import Family
from flashvar_factory.config.older_toolkits import OlderToolkit
from flashvar_factory.config.suggestions import did_you_mean, listed
from flashvar_factory.config.toml_table import Table, Value

FILE_NAME: Final = "variants.toml"
SCHEMA: Final = 1
# The processors that cmake/ knows the symbols of glibc 2.28 for, in the words of wheel tags.
PLATFORMS: Final = ("x86_64", "aarch64")

# By convention of a project: what an instance of an op's kernel includes.
LAUNCHER: Final = "src/cuda/{family}/{launcher}.cuh"
# Bytes a block may have: from less than any GPU's to more than any GPU's, in the hardware's steps.
_SHARED_MEMORY: Final = range(16 * 1024, 1024 * 1024 + 1, 128)

_SUFFIXED: Final = 9  # the first major version that has code of one architecture alone: 90a
_DISTRIBUTION = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"


@dataclass(frozen=True)
class Project:
    """The project that the kernels belong to."""

    name: str  # of the C++ namespace, of the files and of the entry-point group
    abi: int  # of the libraries' C interface
    version_file: str  # relative to variants.toml; holds `__version__ = "..."`
    license: str  # SPDX expression of the binary distributions
    smoke: str | None = None  # a script, relative to variants.toml, that tries what is installed
    torch: str | None = None  # the oldest whose stable ABI the libraries call; None: they call none


@dataclass(frozen=True)
class Target:
    """One architecture that binaries are made for, with one toolkit."""

    architecture: Architecture
    family: str  # the folder of src/cuda with its kernels
    shared_memory: int  # bytes a block may have
    distribution: str
    platforms: tuple[str, ...]  # the processors that a wheel is made for
    also: tuple[Architecture, ...] = ()  # others that the machine code is for
    ran: str = "never"  # one of RAN: where tests of its kernels have run
    toolkit: OlderToolkit | None = None  # that makes the machine code; None: the compiler's own

    @property
    def kind(self) -> BinaryKind:
        """The architecture, and the CUDA major whose drivers run the binary."""
        return BinaryKind(self.architecture, self.toolkit.cuda if self.toolkit else CUDA)

    @property
    def kinds(self) -> tuple[BinaryKind, ...]:
        """Its own kind, and those of the other architectures that it is the binary of."""
        return (self.kind, *(BinaryKind(one, self.kind.cuda) for one in self.also))

    @property
    def spellings(self) -> tuple[str, ...]:
        """The usual names of its kinds."""
        return tuple(name for kind in self.kinds for name in kind.spellings)


@dataclass(frozen=True)
class Dev:
    """What a development build takes where the selection gives nothing."""

    architecture: str
    axes: Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Config:
    """A whole `variants.toml`."""

    project: Project
    ops: Mapping[str, Op]  # every declared op
    default_ops: tuple[str, ...]
    defaults: Mapping[str, Mapping[str, tuple[Value, ...]]]  # op -> axis -> values
    targets: Mapping[str, Target]  # by the name of their kind, in the file's order
    dev: Dev

    @property
    def axes(self) -> Mapping[str, tuple[Value, ...]]:
        """Axis -> every value that it has by default, for whatever op."""
        return _union(self.defaults)

    def made_for(self, device: Architecture) -> Architecture:
        """The architecture whose binaries are made for a device: its own, or one with `also`."""
        every = (one.architecture for one in self.targets.values() if device in one.also)
        return next(every, device)


def read(path: Path) -> Config:
    """Read `variants.toml`; ConfigurationError that names the key on anything off."""
    if not path.is_file():
        raise ConfigurationError(
            f"{path}: expected a readable file, found none: run this in the folder of the project, "
            "or pass it as --root"
        )
    config = parse(toml_table.read(path), path.name)
    _check_sources(config, path)
    return config


def parse(text: str, file: str = FILE_NAME) -> Config:
    """Check every key of the document and return it."""
    top = toml_table.document(text, file)
    schema = top.positive("schema")
    if schema != SCHEMA:
        raise top.wrong("schema", str(SCHEMA), schema)
    project = _project(top.table("project"))
    ops = axes.read(_tables(top, "ops"))
    labels.check(ops, top.path("ops"))
    default_ops, defaults = _defaults(top.table("defaults"), ops)
    limits = families.read(top.table("families"), ops.values()) if "families" in top.rest else {}
    toolkits = older_toolkits.read(top.table("toolkits")) if "toolkits" in top.rest else {}
    targets = _targets(top, project, limits, toolkits)
    _check_limits(top, targets, [ops[name] for name in default_ops], limits)
    dev = _dev(top.table("dev"), _union(defaults), targets)
    top.end(also=["families", "toolkits"])
    return Config(
        project,
        MappingProxyType(ops),
        default_ops,
        MappingProxyType(defaults),
        MappingProxyType(targets),
        dev,
    )


def _union(
    defaults: Mapping[str, Mapping[str, tuple[Value, ...]]],
) -> dict[str, tuple[Value, ...]]:
    union: dict[str, tuple[Value, ...]] = {}
    for axis, values in (pair for of_op in defaults.values() for pair in of_op.items()):
        union[axis] = tuple(dict.fromkeys((*union.get(axis, ()), *values)))
    return union


def _check_sources(config: Config, path: Path) -> None:
    """What is compiled has to be there: a missing file would be an error of nvcc, minutes later."""
    for name, target in config.targets.items():
        for op in config.default_ops:
            launcher = LAUNCHER.format(family=target.family, launcher=config.ops[op].launcher)
            if not (path.parent / launcher).is_file():
                raise ConfigurationError(
                    f"{path.name}: architectures.{name}.family: expected the sources of a family, "
                    f"found {target.family!r} without {launcher}"
                )


def _project(table: Table) -> Project:
    project = Project(
        name=table.name("name"),
        abi=table.positive("abi"),
        version_file=_path(table, "version_file"),
        license=_license(table),
        smoke=_path(table, "smoke") if "smoke" in table.rest else None,
        torch=(
            table.text("torch", torch_coupling.VERSION, torch_coupling.VERSION_MEANING)
            if "torch" in table.rest
            else None
        ),
    )
    table.end(also=["smoke", "torch"])
    return project


def _path(table: Table, key: str) -> str:
    """A path that stays in the folder of the file."""
    value = table.text(key, r"[^/].*", "a path relative to this file")
    if ".." in value.split("/") or not value.isprintable():
        raise table.wrong(key, "a path relative to this file, below its folder", value)
    return value


def _license(table: Table) -> str:
    value = table.text("license", r"\S(.*\S)?", "an SPDX expression")
    try:
        right = canonicalize_license_expression(value)
    except InvalidLicenseExpression as error:
        raise table.wrong("license", f"an SPDX expression ({error})", value) from None
    if right != value:
        raise table.wrong("license", f"the SPDX expression as {right!r}", value)
    return value


def _tables(top: Table, key: str) -> list[tuple[str, Table]]:
    parent = top.table(key)
    if not parent.rest:
        raise top.wrong(key, "at least one entry", {})
    return [(name, parent.table(name)) for name in list(parent.rest)]


def _defaults(
    table: Table, ops: Mapping[str, Op]
) -> tuple[tuple[str, ...], dict[str, Mapping[str, tuple[Value, ...]]]]:
    default_ops = table.values("ops")
    for name in default_ops:
        if name not in ops:
            hint = did_you_mean(str(name), ops)
            raise ConfigurationError(
                f"{table.path('ops')}: unknown op {name!r}, expected {listed(ops)}{hint}"
            )
    own = {name: table.table(name) for name in ops if name in table.rest}
    shared: dict[str, tuple[Value, ...]] = {}
    defaults: dict[str, Mapping[str, tuple[Value, ...]]] = {}
    for op in ops.values():
        values: dict[str, tuple[Value, ...]] = {}
        for axis in op.axes:
            if op.name in own and axis.name in own[op.name].rest:
                where = own[op.name]
                values[axis.name] = where.values(axis.name)
            else:
                where = table
                if axis.name not in shared:
                    shared[axis.name] = table.values(axis.name)
                values[axis.name] = shared[axis.name]
            _check_accepted(where, axis, values[axis.name])
        defaults[op.name] = MappingProxyType(values)
    for name, one in own.items():
        one.end(also=[axis.name for axis in ops[name].axes])
    table.end(also=ops)
    return tuple(map(str, default_ops)), defaults


def _check_accepted(table: Table, axis: BuildAxis, values: Sequence[Value]) -> None:
    for value in values:
        if not axis.accepts(value):
            raise table.wrong(axis.name, str(axis), value)


def _check_limits(
    top: Table, targets: Mapping[str, Target], ops: Sequence[Op], limits: Mapping[str, Family]
) -> None:
    """Every op is compiled for every architecture: nothing beyond what its family can."""
    table = Table({}, "ops", top.file)
    for name in dict.fromkeys(target.family for target in targets.values()):
        for op in ops:
            limits.get(name, Family(name)).check(op, table)


def _targets(
    top: Table,
    project: Project,
    limits: Mapping[str, Family],
    toolkits: Mapping[str, OlderToolkit],
) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    for name, table in _tables(top, "architectures"):
        code = table.text("code", r"[1-9][0-9]+a?", "a compute capability such as '90a'")
        architecture = Architecture.parse(code)
        if architecture.name != name:
            row = architecture.name
            raise table.wrong("code", f"the code of {name} (a row with this is {row})", code)
        if code.endswith("a") and architecture.major < _SUFFIXED:
            raise table.wrong("code", f"no suffix, which begins with {_SUFFIXED}.0", code)
        target = Target(
            architecture,
            family=table.name("family"),
            shared_memory=table.positive("shared_memory"),
            distribution=table.text("distribution", _DISTRIBUTION, "a distribution name"),
            platforms=_platforms(table),
            also=_also(table, architecture),
            ran=_ran(table, "ran") if "ran" in table.rest else Target.ran,
        )
        if expected := limits.get(target.family, Family(target.family)).why_not(architecture):
            raise table.wrong("code", expected, code)
        if target.shared_memory not in _SHARED_MEMORY:
            bounds = f"{_SHARED_MEMORY[0]} to {_SHARED_MEMORY[-1]} in steps of"
            expected = f"the bytes of a block, {bounds} {_SHARED_MEMORY.step}"
            raise table.wrong("shared_memory", expected, target.shared_memory)
        older = (
            replace(
                target,
                toolkit=toolkits[toolkit],
                distribution=f"{target.distribution}-{toolkit}",
                ran=where,
            )
            for toolkit, where in _toolkits(table, toolkits).items()
        )
        for one in (target, *older):
            others = {other.distribution for other in targets.values()}
            if one.distribution in {*others, project.name.replace("_", "-")}:
                expected = "another name each, and none of them the project's own"
                raise table.wrong("distribution", expected, one.distribution)
            targets[one.kind.name] = one
        table.end(also=["platforms", "also", "ran", "toolkits"])
    _check_named_once(top, targets.values())
    _check_distributions(top, targets)
    return targets


def _check_named_once(top: Table, targets: Iterable[Target]) -> None:
    named: set[str] = set()
    for target in targets:
        if target.toolkit is not None:
            continue
        for one in (target.architecture, *target.also):
            if one.name in named:
                expected = "each architecture once, as a row or under `also`"
                raise top.wrong("architectures", expected, one.name)
            named.add(one.name)


def _check_distributions(top: Table, targets: Mapping[str, Target]) -> None:
    """Commands take a distribution for its architecture: it may not be another one's name."""
    named = {spelling: name for name, one in targets.items() for spelling in one.spellings}
    named |= {word: f"a selection of {word}" for word in (names.ALL, names.NATIVE)}
    for name, target in targets.items():
        if (other := named.get(target.distribution, name)) != name:
            raise ConfigurationError(
                f"{top.path(f'architectures.{name}.distribution')}: expected a name of {name} "
                f"alone, found {target.distribution!r}, which commands take for {other}; use "
                "another, such as one that begins with the project's name"
            )


def _also(table: Table, architecture: Architecture) -> tuple[Architecture, ...]:
    """The key `also`: later minor versions of the major version, which plain code runs on."""
    found = []
    for value in table.values("also") if "also" in table.rest else ():
        try:
            other = Architecture.parse(str(value))
        except ValueError:
            other = architecture
        if other == architecture or not architecture.runs_on(other.capability):
            expected = f"architectures that code {architecture.code} runs on"
            raise table.wrong("also", expected, value)
        found.append(other)
    return tuple(found)


def _ran(table: Table, key: str) -> str:
    """Where tests have run, in a word."""
    ran = table.text(key, r".+", "a word")
    if ran not in RAN:
        raise table.wrong(key, f"one of {listed(RAN)}", ran)
    return ran


def _toolkits(table: Table, toolkits: Mapping[str, OlderToolkit]) -> dict[str, str]:
    """Names of [toolkits], and where the tests of their binaries have run."""
    if "toolkits" not in table.rest:
        return {}
    given = table.table("toolkits")
    found = {name: _ran(given, name) for name in toolkits if name in given.rest}
    given.end(also=toolkits)
    return found


def _platforms(table: Table) -> tuple[str, ...]:
    """The key `platforms`; x86_64 alone where it is absent."""
    if "platforms" not in table.rest:
        return PLATFORMS[:1]
    platforms = table.values("platforms")
    for value in platforms:
        if value not in PLATFORMS:
            raise table.wrong("platforms", f"any of {listed(PLATFORMS)}", value)
    return tuple(str(value) for value in platforms)


def _dev(
    table: Table, built: Mapping[str, tuple[Value, ...]], targets: Mapping[str, Target]
) -> Dev:
    architecture = table.text("architecture", r".+", "the name of an architecture")
    if architecture not in targets:
        raise ConfigurationError(
            f"{table.path('architecture')}: unknown architecture {architecture!r}, expected "
            f"{listed(targets)}{did_you_mean(architecture, targets)}"
        )
    chosen: dict[str, tuple[Value, ...]] = {}
    for axis in [axis for axis in built if axis in table.rest]:
        chosen[axis] = table.values(axis)
        for value in chosen[axis]:
            if value not in built[axis]:
                raise table.wrong(axis, f"values of defaults.{axis} ({listed(built[axis])})", value)
    table.end(also=built)
    return Dev(architecture, MappingProxyType(chosen))
