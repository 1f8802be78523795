"""What is asked for, what the user insists on, and what became of every candidate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flashvar.binaries.manifest import KernelRow
from flashvar.binaries.registry import Binary
from flashvar.binaries.variant import Architecture, pair_words
from flashvar.errors import ConfigurationError

BACKENDS: Final = ("auto", "cuda", "triton", "reference")


@dataclass(frozen=True)
class Request:
    """One kind of call: everything about it that decides which kernel can serve it."""

    op: str
    dtype: str  # "bf16", "fp16", "fp32" or "fp64"
    device: int | None  # CUDA device ordinal; None for CPU tensors
    head_dim: int | None = None  # None for ops without one
    head_dim_v: int | None = None  # of the values; None: head_dim

    @property
    def dims(self) -> tuple[int, int]:
        """The head dim of queries and keys, and that of the values; 0 for ops without one."""
        head_dim = self.head_dim or 0
        return head_dim, head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def dim_words(self) -> str:
        """`64`, or `192x128` where the values have their own."""
        return pair_words(*self.dims)

    def __str__(self) -> str:
        """The request in words, for errors and the log."""
        head_dim = "" if self.head_dim is None else f" head dim {self.dim_words}"
        device = "CPU" if self.device is None else f"cuda:{self.device}"
        return f"{self.op} {self.dtype}{head_dim} on {device}"


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


@dataclass(frozen=True)
class Verdict:
    """What one candidate can do for a request, and why."""

    candidate: str  # e.g. "cuda sm_XY", "triton"
    backend: str  # "cuda", "triton" or "reference"
    accepted: bool
    reason: str
    fix: str | None = None  # the command or step that would make it accepted
    binary: Binary | None = None
    kernel: KernelRow | None = None


@dataclass(frozen=True)
class Decision:
    """All verdicts for one request, the preferred candidate first."""

    request: Request
    verdicts: tuple[Verdict, ...]
    strict: bool = False  # of the overrides
    chosen: Verdict | None = field(init=False)

    def __post_init__(self) -> None:
        """The first accepted verdict is the choice."""
        first = next((verdict for verdict in self.verdicts if verdict.accepted), None)
        object.__setattr__(self, "chosen", first)

    @property
    def error(self) -> str | None:
        """What the call raises although a binary was chosen for it; None where it runs."""
        binary = None if self.chosen is None else self.chosen.binary
        if not self.strict or binary is None or binary.skew is None:
            return None
        return f"FLASHVAR_STRICT=1 makes this an error: {binary.skew}"

    def explain(self) -> str:
        """One line per verdict: the candidate, what became of it, why, and the fix."""
        return "\n".join(self._line(verdict) for verdict in self.verdicts)

    def _line(self, verdict: Verdict) -> str:
        if not verdict.accepted:
            fix = f" -> {verdict.fix}" if verdict.fix else ""
            return f"{verdict.candidate}: no: {verdict.reason}{fix}"
        if verdict is self.chosen or self.chosen is None:
            return f"{verdict.candidate}: chosen: {verdict.reason}"
        return f"{verdict.candidate}: {verdict.reason}, but {self.chosen.candidate} is preferred"
