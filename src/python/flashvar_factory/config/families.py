"""The limits of a family of CUDA sources: reads [families].

    [families]
    sm80 = { min = "80", largest = { head_dim = 256 } }

A family that is not listed there is compiled for whatever variants.toml names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flashvar.binaries.kinds import Architecture
from flashvar_factory.config.axes import Op
from flashvar_factory.config.toml_table import Table

_CODE = r"[1-9][0-9]+a?"
_MEANING = "a compute capability such as '90a'"


@dataclass(frozen=True)
class Family:
    """What the sources of a family compile for."""

    name: str
    minimum: Architecture | None = None
    only: Architecture | None = None
    largest: Mapping[str, int] = field(default_factory=dict)  # axis -> integer

    def why_not(self, architecture: Architecture) -> str | None:
        """What is expected of an architecture instead of this one; None where it is supported."""
        if self.only is not None and architecture != self.only:
            return f"code {self.only.code!r}, the only one that family {self.name} compiles for"
        if self.minimum is not None and architecture.capability < self.minimum.capability:
            return f"code {self.minimum.code!r} or higher, which family {self.name} begins with"
        return None

    def check(self, op: Op, table: Table) -> None:
        """ConfigurationError where an axis of `op` reaches beyond what the sources compile for."""
        for axis in op.axes:
            limit = self.largest.get(axis.name)
            if limit is not None and axis.integers and axis.integers[-1] > limit:
                expected = f"{limit} or lower, which family {self.name} compiles {axis.name} for"
                raise table.wrong(f"{op.name}.axes.{axis.name}.max", expected, axis.integers[-1])


def read(table: Table, ops: Iterable[Op]) -> dict[str, Family]:
    """The families of the table, by name."""
    axes = {axis.name for op in ops for axis in op.axes if axis.integers}
    found = {}
    for name in list(table.rest):
        one = table.table(name)
        limits = one.table("largest") if "largest" in one.rest else None
        found[name] = Family(
            name,
            _architecture(one, "min"),
            _architecture(one, "only"),
            {axis: limits.positive(axis) for axis in axes if axis in limits.rest} if limits else {},
        )
        if limits is not None:
            limits.end(also=axes)
        one.end(also=["min", "only", "largest"])
    return found


def _architecture(table: Table, key: str) -> Architecture | None:
    if key not in table.rest:
        return None
    return Architecture.parse(table.text(key, _CODE, _MEANING))
