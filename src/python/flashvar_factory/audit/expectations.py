"""The project's expectations of its wheels, in addition to what each states about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from packaging.utils import canonicalize_name

from flashvar.binaries.kinds import Architecture
from flashvar_factory.build import wheel
from flashvar_factory.config.schema import Config
from flashvar_factory.inspect.archive import Name

# All head dims of an architecture, forward and backward, fit.
BUDGET: Final = 20_000_000


@dataclass(frozen=True)
class Expectations:
    """Facts of the project. Without them a wheel is checked against what it says of itself."""

    architectures: Mapping[str, Architecture] = field(default_factory=lambda: MappingProxyType({}))
    functions: frozenset[str] = frozenset()  # that every library exports
    budget: int | None = None  # bytes a wheel may have; BUDGET for wheels of the factory
    config: Config | None = None
    root: Path | None = None  # of the sources that the wheel is to be made of
    # Folders of the pure distributions beside the project's own, by name.
    packages: Mapping[str, Path] = field(default_factory=lambda: MappingProxyType({}))
    revision: str | None = None  # the commit that is released
    spills: bool = False  # any spill is allowed: the budgets of the project are not known

    def architecture(self, name: Name) -> Architecture | None:
        """What a wheel of this name holds; None when that is not known."""
        return self.architectures.get(canonicalize_name(name.distribution))

    def is_projects_own(self, name: Name) -> bool:
        """Whether this is the name of the wheel that holds the project itself, or a package of it.

        That has no binary, and is compared with its sources.
        """
        found = canonicalize_name(name.distribution)
        return found in self.packages or (
            self.config is not None and found == canonicalize_name(self.config.project.name)
        )

    def concerns(self, name: Name) -> bool:
        """Whether a wheel of this name is one of the project, or begins with the project's name."""
        if self.config is None:
            return True
        found = canonicalize_name(name.distribution)
        project = canonicalize_name(self.config.project.name)
        ours = {project, *self.packages, *map(canonicalize_name, self.architectures)}
        return found in ours or found.startswith(f"{project}-")

    def is_variant(self, name: Name) -> bool:
        """Whether this is a wheel of the project itself, with a binary in it, that has a label.

        Labels of other names are believed where the project is not known.
        """
        is_ours = self.config is None or self.is_projects_own(name)
        return name.variant_label is not None and is_ours

    def folder(self, name: Name) -> Path | None:
        """Where the pyproject.toml of a wheel of the project is; None where that is not known."""
        folder = self.packages.get(canonicalize_name(name.distribution), self.root)
        return folder if folder is not None and (folder / "pyproject.toml").is_file() else None


def of(
    config: Config,
    budget: int | None = None,
    *,
    root: Path | None = None,
    revision: str | None = None,
) -> Expectations:
    """What variants.toml says, and the sources at `root`."""
    return Expectations(
        {target.distribution: target.architecture for target in config.targets.values()},
        frozenset(config.ops),
        budget,
        config,
        root,
        {} if root is None else wheel.packages(config, root),
        revision,
    )
