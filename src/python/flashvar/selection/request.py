"""The request for a kernel, and the user's overrides of selection."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from flashvar import ops
from flashvar.binaries.kinds import BinaryKind
from flashvar.errors import ConfigurationError, InvalidInputError
from flashvar.ops.op import Axis, OpSpec, Value, value_text

BackendName = Literal["auto", "cuda", "triton", "reference"]
BACKENDS: Final[tuple[str, ...]] = get_args(BackendName)


@dataclass(frozen=True)
class Request:
    """One kind of call: the properties that decide which kernel can run it."""

    function: str  # of an op, e.g. "<op>_fwd"
    dtype: str  # "bf16", "fp16", "fp32" or "fp64"
    device: int | None  # CUDA device ordinal; None for CPU tensors
    axes: tuple[Value, ...] = ()  # a value for each of the op's axes, in order

    @classmethod
    def of(
        cls, function: str, dtype: str, device: int | None, **axes: str | int | tuple[int, ...]
    ) -> Request:
        """A request whose axes are given by name.

        Raises:
            InvalidInputError: no op has the function, or the op has other axes.
        """
        spec = ops.spec_of(function)
        names = [axis.name for axis in spec.axes]
        if sorted(names) != sorted(axes):
            raise InvalidInputError(
                f"{function}: expected a value for each of the axes {names}, found {sorted(axes)}"
            )
        values = tuple(axis.value(axes[axis.name]) for axis in spec.axes)
        return cls(function, dtype, device, values)

    @classmethod
    def of_call(cls, function: str, dtype: str, device: int | None, call: object) -> Request:
        """The request of a call that has an attribute for each of the op's axes.

        Raises:
            InvalidInputError: no op has the function.
        """
        return cls(function, dtype, device, ops.spec_of(function).values_of(call))

    def __post_init__(self) -> None:
        """Refuse values that are not those of the op's axes."""
        spec = ops.find(self.function)  # an unknown function is refused where it is looked up
        if spec is None:
            return
        fits = len(self.axes) == len(spec.axes)
        if not fits or not all(map(Axis.takes, spec.axes, self.axes)):
            raise InvalidInputError(
                f"{self.function}: expected a value for each of the axes "
                f"{[axis.name for axis in spec.axes]}, found {self.axes!r}"
            )

    @property
    def spec(self) -> OpSpec:
        """The op of the function; InvalidInputError if no op has it."""
        return ops.spec_of(self.function)

    @property
    def by_axis(self) -> tuple[tuple[Axis, Value], ...]:
        """Each axis and its value."""
        return tuple(zip(self.spec.axes, self.axes, strict=True))

    @property
    def kind(self) -> str:
        """The axes in words: `row dim 64`; empty for ops without axes."""
        return kind_text(self.spec.axes, self.axes)

    def __str__(self) -> str:
        """The request in words, for errors and the log."""
        device = "CPU" if self.device is None else f"cuda:{self.device}"
        kind = f" {self.kind}" if self.axes else ""
        return f"{self.function} {self.dtype}{kind} on {device}"


def kind_text(axes: tuple[Axis, ...], *values: tuple[Value, ...]) -> str:
    """Values of axes in words: `row dim 64`, `row dims 64, 128`; empty for ops without axes.

    With several axes, combinations of values are listed one by one.
    """
    if not axes:
        return ""
    kinds = sorted(set(values))
    if len(axes) == 1:
        many = "s" if len(kinds) > 1 else ""
        return f"{axes[0].words}{many} {', '.join(value_text(one) for (one,) in kinds)}"
    return "; ".join(
        ", ".join(
            f"{axis.words} {value_text(value)}" for axis, value in zip(axes, kind, strict=True)
        )
        for kind in kinds
    )


@dataclass(frozen=True)
class Overrides:
    """The user's overrides of selection."""

    backend: str = "auto"  # one of BACKENDS; a named backend has no fallback
    kind: str | None = None  # consider only these binaries: "sm_XY", or "sm_XY-cuN"
    # Errors: a binary of another version, a fallback of an integration, offsets that do not fit.
    strict: bool = False

    @classmethod
    def from_environment(
        cls, backend: str = "auto", environ: Mapping[str, str] = os.environ
    ) -> Overrides:
        """The overrides of FLASHVAR_BACKEND, _FORCE_ARCH and _STRICT; a named `backend` wins."""
        source = "backend"
        named = isinstance(backend, str)
        if named and backend == "auto" and environ.get("FLASHVAR_BACKEND"):
            source, backend = "FLASHVAR_BACKEND", environ["FLASHVAR_BACKEND"]
        if not named or backend not in BACKENDS:
            error = InvalidInputError if source == "backend" else ConfigurationError
            raise error(
                f"{source}: expected one of {', '.join(BACKENDS)}, found {backend!r}: leave it out "
                "for auto"
            )
        forced = environ.get("FLASHVAR_FORCE_ARCH") or None
        if forced is not None:
            try:
                forced = BinaryKind.parse(forced).name
            except ValueError as error:
                raise ConfigurationError(
                    f"FLASHVAR_FORCE_ARCH: {error}: unset it for the binary that fits each device; "
                    "`flashvar doctor` then lists the installed ones"
                ) from None
        strict = environ.get("FLASHVAR_STRICT", "")
        if strict not in ("", "0", "1"):
            raise ConfigurationError(
                f"FLASHVAR_STRICT: expected 0 or 1, found {strict!r}: set it to 1 to make other "
                "versions of binaries and fallbacks errors, or unset it"
            )
        return cls(backend, forced, strict == "1")
