"""What must hold for a wheel, beside what it says of itself?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from flashvar.binaries.variant import Architecture
from flashvar_factory.archive import Name
from flashvar_factory.schema import Config

# All head dims of an architecture, forward and backward, fit.
BUDGET: Final = 20_000_000


@dataclass(frozen=True)
class Expectations:
    """Facts of the project. Without them a wheel is judged by what it says of itself."""

    architectures: Mapping[str, Architecture] = field(default_factory=lambda: MappingProxyType({}))
    ops: frozenset[str] = frozenset()  # whose functions every library exports
    budget: int | None = None  # bytes a wheel may have; BUDGET for wheels of the factory

    def architecture(self, name: Name) -> Architecture | None:
        """What a wheel of this name holds; None when that is not known."""
        return self.architectures.get(name.distribution.replace("_", "-"))


def of(config: Config, budget: int | None = None) -> Expectations:
    """What variants.toml says."""
    return Expectations(
        {target.distribution: target.architecture for target in config.targets.values()},
        frozenset(config.ops),
        budget,
    )
