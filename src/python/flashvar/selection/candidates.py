"""Candidate results, rejection reasons, and the decision for a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashvar.binaries.manifest import KernelRow
from flashvar.binaries.registry import Binary, RejectedFolder
from flashvar.selection.request import Request


@dataclass(frozen=True)
class Rejection:
    """Why a candidate cannot run a call."""

    reason: str
    fix: str | None = None


@dataclass(frozen=True)
class CandidateResult:
    """Whether one candidate can run a request, and why."""

    candidate: str  # e.g. "cuda sm_XY", "triton"
    backend: str  # "cuda", "triton" or "reference"
    accepted: bool
    reason: str
    fix: str | None = None  # the command or step that would make it accepted
    binary: Binary | None = None
    kernel: KernelRow | None = None
    missing: bool = False  # a binary that is made for this platform, and is not installed
    rejected: RejectedFolder | None = None  # the folder of a binary that cannot be used
    explicit: bool = False  # by a named backend, or FLASHVAR_BACKEND; no other may run the call


@dataclass(frozen=True)
class Decision:
    """All results for one request, the preferred candidate first."""

    request: Request
    results: tuple[CandidateResult, ...]
    strict: bool = False  # of the overrides
    chosen: CandidateResult | None = field(init=False)

    def __post_init__(self) -> None:
        """The first accepted candidate is the choice."""
        first = next((result for result in self.results if result.accepted), None)
        object.__setattr__(self, "chosen", first)

    @property
    def error(self) -> str | None:
        """The error of a call for which a binary was chosen; None if the call runs."""
        binary = None if self.chosen is None else self.chosen.binary
        if not self.strict or binary is None or binary.version_mismatch is None:
            return None
        return f"FLASHVAR_STRICT=1 makes this an error: {binary.version_mismatch}"

    def explain(self, backend: str = "auto") -> str:
        """One line per candidate, of a backend or of all: its result, the reason, and the fix."""
        shown = (one for one in self.results if backend in ("auto", one.backend))
        return "\n".join(self._line(result) for result in shown)

    def _line(self, result: CandidateResult) -> str:
        if not result.accepted:
            fix = f" -> {result.fix}" if result.fix else ""
            return f"{result.candidate}: no: {result.reason}{fix}"
        if result is self.chosen or self.chosen is None:
            return f"{result.candidate}: chosen: {result.reason}"
        return f"{result.candidate}: {result.reason}, but {self.chosen.candidate} is preferred"
