"""What is asked for, and what the user insists on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flashvar import ops
from flashvar.binaries.variant import Architecture
from flashvar.errors import ConfigurationError, InvalidInputError
from flashvar.ops.op import Axis, OpSpec, Value, spelled

BACKENDS: Final = ("auto", "cuda", "triton", "reference")


@dataclass(frozen=True)
class Request:
    """One kind of call: everything about it that decides which kernel can serve it."""

    function: str  # of an op, e.g. "attention_fwd"
    dtype: str  # "bf16", "fp16", "fp32" or "fp64"
    device: int | None  # CUDA device ordinal; None for CPU tensors
    axes: tuple[Value, ...] = ()  # a value for each axis of the op, in its order

    @classmethod
    def of(
        cls, function: str, dtype: str, device: int | None, **axes: str | int | tuple[int, ...]
    ) -> Request:
        """A request with its axes by name.

        Raises:
            InvalidInputError: no op has the function, or it has other axes.
        """
        spec = ops.spec_of(function)
        names = [axis.name for axis in spec.axes]
        if sorted(names) != sorted(axes):
            raise InvalidInputError(
                f"{function}: expected a value for each of the axes {names}, found {sorted(axes)}"
            )
        values = tuple(axis.value(axes[axis.name]) for axis in spec.axes)
        return cls(function, dtype, device, values)

    @property
    def spec(self) -> OpSpec:
        """The op; InvalidInputError where no op has the function."""
        return ops.spec_of(self.function)

    @property
    def by_axis(self) -> tuple[tuple[Axis, Value], ...]:
        """Each axis and its value."""
        return tuple(zip(self.spec.axes, self.axes, strict=True))

    @property
    def kind(self) -> str:
        """The axes in words: `head dim 64`; empty for ops without axes."""
        return kind_words(self.spec.axes, self.axes)

    def __str__(self) -> str:
        """The request in words, for errors and the log."""
        device = "CPU" if self.device is None else f"cuda:{self.device}"
        kind = f" {self.kind}" if self.axes else ""
        return f"{self.function} {self.dtype}{kind} on {device}"


def kind_words(axes: tuple[Axis, ...], *values: tuple[Value, ...]) -> str:
    """Values of axes in words: `head dim 64`, `head dims 64, 128`; nothing of no axes.

    Kinds of several axes are told one by one.
    """
    if not axes:
        return ""
    kinds = sorted(set(values))
    if len(axes) == 1:
        many = "s" if len(kinds) > 1 else ""
        return f"{axes[0].words}{many} {', '.join(spelled(one) for (one,) in kinds)}"
    return "; ".join(
        ", ".join(f"{axis.words} {spelled(value)}" for axis, value in zip(axes, kind, strict=True))
        for kind in kinds
    )


@dataclass(frozen=True)
class Overrides:
    """What the user insists on."""

    backend: str = "auto"  # one of BACKENDS; anything but "auto" never falls back
    architecture: str | None = None  # consider this binary alone, e.g. "sm_XY"
    strict: bool = False  # a version that differs between flashvar and a binary is an error

    @classmethod
    def from_environment(
        cls, backend: str = "auto", environ: Mapping[str, str] = os.environ
    ) -> Overrides:
        """The caller's backend, completed by FLASHVAR_BACKEND, _FORCE_ARCH and _STRICT."""
        source = "backend"
        named = isinstance(backend, str)
        if named and backend == "auto" and environ.get("FLASHVAR_BACKEND"):
            source, backend = "FLASHVAR_BACKEND", environ["FLASHVAR_BACKEND"]
        if not named or backend not in BACKENDS:
            raise ConfigurationError(
                f"{source}: expected one of {', '.join(BACKENDS)}, found {backend!r}: leave it out "
                "for auto"
            )
        forced = environ.get("FLASHVAR_FORCE_ARCH") or None
        if forced is not None:
            try:
                forced = Architecture.parse(forced).name
            except ValueError as error:
                raise ConfigurationError(f"FLASHVAR_FORCE_ARCH: {error}") from None
        strict = environ.get("FLASHVAR_STRICT", "")
        if strict not in ("", "0", "1"):
            raise ConfigurationError(f"FLASHVAR_STRICT: expected 0 or 1, found {strict!r}")
        return cls(backend, forced, strict == "1")
