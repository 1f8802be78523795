"""OpSpec, the description of an op that selection, loader, commands, benchmarks and docs read.

An op has functions, such as a forward and a backward. Manifests and variants.toml name the function
in `op`, and libraries export it as `flashvar_<function>`. Kernels of a function differ in dtype and
in the op's axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from flashvar.binaries.kinds import SECOND

# A value of an axis: a name, or one integer, or two where the axis has pairs.
Value: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """A property of calls that kernels are compiled for."""

    name: str  # in manifests and requests, e.g. "row_dim"
    words: str  # for people, e.g. "row dim"
    at_least: bool = False  # kernels of larger values fit too; else only the exact value
    pairs: bool = False  # a value is two integers; a single number stands for two equal ones
    step: int = 1  # kernels support only multiples of it
    multiple: int = 1  # every function's kernels are compiled for multiples of it
    maximum: int | None = None  # the largest value that any kernel supports
    # The largest value that a function's kernels in binaries are compiled for, where Triton
    # supports larger ones.
    compiled_to: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    # The largest value that Triton supports on GPUs below a capability: that, and the value.
    triton_below: tuple[tuple[int, int], int] | None = None
    # Kernels up to this value support any smaller value; larger ones support values down to half
    # their own. 0: no limit.
    cheap: int = 0
    usual: tuple[Value, ...] = ()  # the values of most models
    has_names: bool = False  # values are names, not integers

    def takes(self, given: object) -> bool:
        """Whether something is a value of the axis, in its normal form or not."""
        if isinstance(given, tuple):
            return (
                not self.has_names and len(given) == 1 + self.pairs and all(map(_is_count, given))
            )
        return isinstance(given, str) if self.has_names else _is_count(given)

    def value(self, given: str | int | tuple[int, ...]) -> Value:
        """The normal form of a value: 64 becomes (64, 64) where the axis has pairs, else (64,)."""
        if isinstance(given, int):
            return (given,) * (2 if self.pairs else 1)
        return given

    def value_of(self, call: object) -> Value:
        """The value of a call, which has an attribute of this name; for a pair also with SECOND."""
        found = getattr(call, self.name)
        return (found, getattr(call, self.name + SECOND)) if self.pairs else self.value(found)

    def fits(self, compiled: Value, needed: Value) -> bool:
        """Whether a kernel that is compiled for one value runs calls with another."""
        if not self.at_least or isinstance(compiled, str) or isinstance(needed, str):
            return compiled == needed
        return all(have >= want for have, want in zip(compiled, needed, strict=True))

    def wasteful(self, compiled: Value, needed: Value) -> bool:
        """Whether more than half of the kernel's work would be on padding."""
        if isinstance(compiled, str) or isinstance(needed, str):
            return False
        # Of a pair the larger integer counts: the kernel's tiles have room for both.
        return max(compiled) > self.cheap > 0 and max(compiled) > 2 * max(needed)

    def compiled_for(self, needed: Value, function: str) -> Value | None:
        """The smallest value that a function's kernels can be compiled for to support `needed`.

        None where they can be compiled for no such value.
        """
        if isinstance(needed, str):
            return needed
        found = tuple(-(-one // self.multiple) * self.multiple for one in needed)
        largest = self.compiled_to.get(function, self.maximum)
        return None if largest is not None and max(found) > largest else found

    @property
    def limits(self) -> str:
        """The supported values in words: `to 256 in steps of 8`."""
        largest = "" if self.maximum is None else f"to {self.maximum} "
        return f"{largest}in steps of {self.step}"

    def off_step(self, needed: Value) -> bool:
        """Whether no kernel supports the value because it is not a multiple of the step."""
        return not isinstance(needed, str) and any(one % self.step for one in needed)

    def too_large_in_triton(self, needed: Value, capability: tuple[int, int]) -> bool:
        """Whether the value needs a GPU of a higher capability than this."""
        if self.triton_below is None or isinstance(needed, str):
            return False
        since, largest = self.triton_below
        return capability < since and max(needed) > largest

    def too_large(self, needed: Value) -> bool:
        """Whether no kernel supports the value because it exceeds the maximum."""
        return (
            self.maximum is not None and not isinstance(needed, str) and max(needed) > self.maximum
        )


def _is_count(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


@dataclass(frozen=True)
class OpSpec:
    """Everything that code outside the op's own folders knows about an op."""

    name: str
    functions: tuple[str, ...]
    axes: tuple[Axis, ...] = ()  # without the dtype, in the order of manifests
    usual_dtypes: tuple[str, ...] = ("bf16", "fp16")
    # The functions that binaries of a release have kernels for, each with their dtypes.
    compiled: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    # The dtypes of its Triton kernels, each with the lowest NVIDIA capability that Triton compiles
    # it for. Empty: the op has no Triton kernel.
    triton: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    without_triton: tuple[str, ...] = ()  # the functions that have no Triton kernel
    reference: tuple[str, ...] = ("bf16", "fp16", "fp32", "fp64")  # dtypes of its reference
    # Names of modules, imported on first use; None where the op does not have one.
    warmup: str | None = None  # protocol flashvar.cli.warmup.OpWarmup
    tune: str | None = None  # protocol flashvar.cli.tune.OpTune
    # Names of modules, by what each times: the op, or one function of it. Protocol
    # flashvar.cli.speed.OpSpeed.
    speed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    verify: str | None = None  # protocol flashvar.cli.verify.OpVerify

    def axis(self, name: str) -> Axis:
        """The axis with a name; KeyError if the op has none."""
        return {axis.name: axis for axis in self.axes}[name]

    def in_triton(self, function: str) -> Mapping[str, tuple[int, int]]:
        """The dtypes of a function's Triton kernels, as `triton`."""
        return {} if function in self.without_triton else self.triton

    def has_kernels(self, function: str) -> bool:
        """Whether a backend other than the reference has kernels of a function."""
        return function in self.compiled or bool(self.in_triton(function))

    def values_of(self, call: object) -> tuple[Value, ...]:
        """The axis values of a call, which has an attribute of each axis's name."""
        return tuple(axis.value_of(call) for axis in self.axes)


def value_text(value: Value) -> str:
    """The text of a value in messages and commands: `bf16`, `64`, `192x128`."""
    if isinstance(value, str):
        return value
    return str(value[0]) if len(set(value)) == 1 else "x".join(map(str, value))
