"""One description per op: what selection, loader, command line, benchmarks and docs read of it.

An op has functions, such as a forward and a backward. A function is a row's `op` in manifests and
in variants.toml, and `flashvar_<function>` is what libraries export for it. Kernels of a function
differ in its dtype and in the op's axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

# Of an axis: a name, or integers; two of them where the axis has pairs.
Value: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """A property of calls that kernels are compiled for."""

    name: str  # in manifests and requests, e.g. "head_dim"
    words: str  # for people, e.g. "head dim"
    at_least: bool = False  # a kernel of a larger value serves too; else that of the value alone
    pairs: bool = False  # a value is two integers; one number stands for the same twice
    step: int = 1  # kernels take multiples of it
    maximum: int | None = None  # that any kernel takes
    cheap: int = (
        0  # to here a kernel of a larger value costs little; above, at most twice the value
    )
    usual: tuple[Value, ...] = ()  # what most models have

    def value(self, given: str | int | tuple[int, ...]) -> Value:
        """A value in its one form: 64 becomes (64, 64) where the axis has pairs, else (64,)."""
        if isinstance(given, int):
            return (given,) * (2 if self.pairs else 1)
        return given

    def serves(self, held: Value, asked: Value) -> bool:
        """Whether a kernel compiled for one value serves calls of another."""
        if not self.at_least or isinstance(held, str) or isinstance(asked, str):
            return held == asked
        return all(have >= want for have, want in zip(held, asked, strict=True))

    def wasteful(self, held: Value, asked: Value) -> bool:
        """Whether more than half of the work of such a kernel would be for nothing."""
        if isinstance(held, str) or isinstance(asked, str):
            return False
        # The larger integer counts: a call with two runs in the size that holds both.
        return max(held) > self.cheap > 0 and max(held) > 2 * max(asked)

    @property
    def limits(self) -> str:
        """What kernels take, in words: `to 256 in steps of 8`."""
        largest = "" if self.maximum is None else f"to {self.maximum} "
        return f"{largest}in steps of {self.step}"

    def off_step(self, asked: Value) -> bool:
        """Whether no kernel takes the value because it is between two steps."""
        return not isinstance(asked, str) and any(one % self.step for one in asked)

    def too_large(self, asked: Value) -> bool:
        """Whether no kernel takes the value because it is beyond the maximum."""
        return self.maximum is not None and not isinstance(asked, str) and max(asked) > self.maximum


@dataclass(frozen=True)
class OpSpec:
    """What the rest of flashvar knows of an op."""

    name: str
    functions: tuple[str, ...]
    axes: tuple[Axis, ...] = ()  # besides the dtype, in the order of manifests
    usual_dtypes: tuple[str, ...] = ("bf16", "fp16")
    # The dtypes of its Triton kernels, and the lowest NVIDIA capability that Triton compiles each
    # for. Empty: Triton has no kernel of the op.
    triton: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    # Modules that are imported when they are asked for; None where the op has no such thing.
    warmup: str | None = None  # protocol flashvar.cli.warmup.OpWarmup
    tune: str | None = None  # protocol flashvar.cli.tune.OpTune
    speed: str | None = None  # protocol flashvar.cli.speed.OpSpeed

    def axis(self, name: str) -> Axis:
        """The axis of a name; KeyError when the op has no such axis."""
        return {axis.name: axis for axis in self.axes}[name]


def spelled(value: Value) -> str:
    """A value as people and commands write it: `bf16`, `64`, `192x128`."""
    if isinstance(value, str):
        return value
    return str(value[0]) if len(set(value)) == 1 else "x".join(map(str, value))
