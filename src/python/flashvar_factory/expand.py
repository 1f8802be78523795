"""Which binaries, with which kernels? Configuration and selection -> a plan for every build."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashvar.variant import Architecture, Kernel
from flashvar_factory import native
from flashvar_factory.schema import Config, Op
from flashvar_factory.toml_table import Value
from flashvar_factory.words import NATIVE, Words


@dataclass(frozen=True)
class Selection:
    """What to build, nothing left open."""

    architectures: tuple[str, ...]
    ops: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]  # a value list for every axis
    ptx: bool = False


@dataclass(frozen=True)
class Build:
    """One binary: an architecture and the kernels in it."""

    architecture: Architecture
    code: str  # what the compiler is told, "90a"
    family: str
    shared_memory: int  # bytes a block may have on this architecture
    distribution: str
    code_kinds: tuple[str, ...]  # ("sass",) or ("sass", "ptx")
    kernels: tuple[Kernel, ...]

    @property
    def stem(self) -> str:
        """The distribution as a file name: of the folder and of lib<stem>.so."""
        return self.distribution.replace("-", "_")


def select_all(words: Words, config: Config, found: Sequence[native.Capability] = ()) -> Selection:
    """The selection of a release: what was not said is everything."""
    return Selection(
        _architectures(words.architectures or tuple(config.targets), config, found),
        words.ops or config.default_ops,
        {**config.axes, **words.axes},
        words.ptx,
    )


def select_dev(words: Words, config: Config, found: Sequence[native.Capability]) -> Selection:
    """What a development build takes: this machine's GPUs, and [dev] where nothing was said."""
    return Selection(
        _architectures(words.architectures or (NATIVE,), config, found),
        words.ops or config.default_ops,
        {**config.axes, **config.dev.axes, **words.axes},
        words.ptx,
    )


def _architectures(
    names: tuple[str, ...], config: Config, found: Sequence[native.Capability]
) -> tuple[str, ...]:
    resolved = (native.resolve(found, config) if name == NATIVE else (name,) for name in names)
    chosen = set(itertools.chain.from_iterable(resolved))
    return tuple(name for name in config.targets if name in chosen)


def expand(config: Config, selection: Selection) -> tuple[Build, ...]:
    """One Build per selected architecture, in the order of variants.toml."""
    kernels = tuple(
        kernel for op in selection.ops for kernel in _kernels(config.ops[op], selection.axes)
    )
    kinds = ("sass", "ptx") if selection.ptx else ("sass",)
    return tuple(
        Build(
            target.architecture,
            target.architecture.code,
            target.family,
            target.shared_memory,
            target.distribution,
            kinds,
            kernels,
        )
        for target in (config.targets[name] for name in selection.architectures)
    )


def _kernels(op: Op, axes: Mapping[str, tuple[Value, ...]]) -> list[Kernel]:
    names = [axis.name for axis in op.axes]
    combinations = itertools.product(*(axes[name] for name in names))
    return [Kernel(op.name, tuple(zip(names, values, strict=True))) for values in combinations]
