"""Expands configuration and selection into builds: one binary each, with its kernels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashvar.binaries.kinds import BinaryKind, Kernel
from flashvar.errors import ConfigurationError
from flashvar_factory.config import this_machine
from flashvar_factory.config.axes import BuildAxis
from flashvar_factory.config.names import NATIVE
from flashvar_factory.config.schema import PLATFORMS, Config, Target
from flashvar_factory.config.selection_arguments import SelectionArguments
from flashvar_factory.config.suggestions import listed
from flashvar_factory.config.toml_table import Value


@dataclass(frozen=True)
class Selection:
    """What to build, nothing left open."""

    targets: tuple[str, ...]  # names of variants.toml
    ops: tuple[str, ...]
    # The values that were given; an axis that is absent, or has (), takes its defaults.
    axes: Mapping[str, tuple[Value, ...]]
    ptx: bool = False
    platform: str = this_machine.PROCESSOR


@dataclass(frozen=True)
class Build:
    """One binary: its target, and the kernels in it."""

    target: Target
    code_kinds: tuple[str, ...]  # ("sass",) or ("sass", "ptx")
    kernels: tuple[Kernel, ...]
    platform: str  # the processor it runs beside: "x86_64", "aarch64"
    torch: str | None = None  # the oldest whose stable ABI the library calls

    @property
    def kind(self) -> BinaryKind:
        """The kind of its target."""
        return self.target.kind

    @property
    def distribution(self) -> str:
        """The distribution of its target."""
        return self.target.distribution

    @property
    def stem(self) -> str:
        """The distribution as a file name: of the folder and of lib<stem>.so."""
        return self.distribution.replace("-", "_")


def select_all(
    arguments: SelectionArguments, config: Config, found: Sequence[this_machine.Capability] = ()
) -> Selection:
    """The selection of a release: what was not given is everything."""
    platform = arguments.platform or this_machine.PROCESSOR
    there = [name for name, target in config.targets.items() if platform in target.platforms]
    asked = arguments.targets or tuple(config.targets)
    everything = asked == tuple(config.targets)
    chosen = tuple(there) if everything else _targets(asked, config, found)
    lacking = [name for name in chosen if name not in there]
    if lacking:
        first, *rest = (config.targets[name].platforms for name in lacking)
        shared = [one for one in first if all(one in platforms for platforms in rest)]
        fix = f"pass platform={shared[0]}, or " if shared else ""
        raise ConfigurationError(
            f"platform={platform}: expected architectures with wheels for it, "
            f"{listed(there) or '(there are none)'}, found {listed(lacking)}; "
            f"{fix}add it to `platforms` in variants.toml"
        )
    return Selection(
        chosen,
        arguments.ops or config.default_ops,
        arguments.axes,
        arguments.ptx,
        platform,
    )


def select_dev(
    arguments: SelectionArguments, config: Config, found: Sequence[this_machine.Capability]
) -> Selection:
    """What a development build takes: this machine's GPUs, and [dev] where nothing was given."""
    if arguments.platform not in (None, this_machine.PROCESSOR):
        raise ConfigurationError(
            f"platform={arguments.platform}: expected {this_machine.PROCESSOR}, found another "
            "processor: development builds run where they are made; wheels are cross-compiled"
        )
    return Selection(
        _targets(arguments.targets or (NATIVE,), config, found),
        arguments.ops or config.default_ops,
        {**config.dev.axes, **arguments.axes},
        arguments.ptx,
    )


def _targets(
    names: tuple[str, ...], config: Config, found: Sequence[this_machine.Capability]
) -> tuple[str, ...]:
    resolved = (
        this_machine.resolve(found, config) if name == NATIVE else (name,) for name in names
    )
    chosen = set(itertools.chain.from_iterable(resolved))
    return tuple(name for name in config.targets if name in chosen)


def expand(config: Config, selection: Selection) -> tuple[Build, ...]:
    """One Build per selected target, in the order of variants.toml."""
    kernels = tuple(
        kernel for op in selection.ops for kernel in _kernels(op, config, selection.axes)
    )
    if not kernels:
        raise ConfigurationError(
            f"expected values that one of {listed(selection.ops)} takes together, found "
            f"{dict(selection.axes)}"
        )
    _check_names(kernels)
    return tuple(
        Build(
            target,
            # An older driver cannot read the PTX of this compiler.
            ("sass", "ptx") if selection.ptx and target.toolkit is None else ("sass",),
            kernels,
            selection.platform,
            config.project.torch,
        )
        for target in (config.targets[name] for name in selection.targets)
    )


def _check_names(kernels: Sequence[Kernel]) -> None:
    """ConfigurationError where two kernels have one name, which is that of a file too."""
    named: dict[str, Kernel] = {}
    for kernel in kernels:
        other = named.setdefault(kernel.name, kernel)
        if other is not kernel:
            both = " and ".join(f"{one.function} {one.values}" for one in (other, kernel))
            raise ConfigurationError(
                f"expected kernels of different names, found {kernel.name} for {both}: rename a "
                "function or a choice"
            )


def expand_platforms(arguments: SelectionArguments, config: Config) -> tuple[Build, ...]:
    """The builds of a release for every platform, or for the one that was given."""
    platforms = PLATFORMS if arguments.platform is None else (arguments.platform,)
    selections = (select_all(replace(arguments, platform=one), config) for one in platforms)
    return tuple(build for one in selections for build in expand(config, one))


def _kernels(op: str, config: Config, given: Mapping[str, tuple[Value, ...]]) -> list[Kernel]:
    axes = config.ops[op].axes
    values = (_values(axis, given.get(axis.name, ()), config.defaults[op]) for axis in axes)
    return [
        Kernel(op, tuple(itertools.chain.from_iterable(map(BuildAxis.entries, axes, combination))))
        for combination in itertools.product(*values)
    ]


def _values(
    axis: BuildAxis, given: Sequence[Value], defaults: Mapping[str, tuple[Value, ...]]
) -> Sequence[Value]:
    """What was given, as far as this op's axis takes it: another op may take more."""
    return [value for value in given if axis.accepts(value)] if given else defaults[axis.name]
