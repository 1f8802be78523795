"""Finds functions that run on a slower backend although an installed binary should run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from flashvar.binaries.registry import Binary
from flashvar.selection.candidates import CandidateResult, Decision
from flashvar.selection.compatibility import is_subset, nearest_kernel
from flashvar.selection.request import Request

NOTHING: Final = "nothing"
_REFERENCE: Final = "reference"


@dataclass(frozen=True)
class Fallback:
    """Functions of ops that fall back on a device, all for one reason."""

    device: int
    functions: tuple[str, ...]
    candidate: str  # what runs them instead, or NOTHING
    reason: str  # why the better candidate does not

    def __str__(self) -> str:
        """The fallback in words."""
        return (
            f"On cuda:{self.device} {self.candidate} runs {', '.join(self.functions)} "
            f"({self.reason})"
        )


def fallbacks(decisions: Iterable[Decision]) -> tuple[Fallback, ...]:
    """The functions that nothing but the reference runs, or that a binary should run."""
    on_device: dict[int, list[Decision]] = {}
    for decision in decisions:
        if decision.request.device is not None:
            on_device.setdefault(decision.request.device, []).append(decision)
    found: dict[tuple[int, str, str], list[str]] = {}
    for device, mine in on_device.items():
        for decision, better in (*_without_kernel(mine), *_not_by_binary(mine)):
            instead = NOTHING if decision.chosen is None else decision.chosen.candidate
            functions = found.setdefault((device, instead, _reason(better)), [])
            if decision.request.function not in functions:
                functions.append(decision.request.function)
    return tuple(
        Fallback(device, tuple(functions), instead, reason)
        for (device, instead, reason), functions in found.items()
    )


def _reason(better: CandidateResult) -> str:
    return f"{better.candidate}: {better.reason}"


def _without_kernel(decisions: list[Decision]) -> Iterator[tuple[Decision, CandidateResult]]:
    """Calls of most models that have no kernel in any dtype."""
    kinds: dict[tuple[object, ...], list[Decision]] = {}
    for decision in decisions:
        request = decision.request
        if _is_usual(request) and request.spec.has_kernels(request.function):
            kinds.setdefault((request.function, request.axes), []).append(decision)
    for alike in kinds.values():
        if not any(map(has_kernel, alike)):
            others = [one for one in alike[0].results if one.backend != _REFERENCE]
            yield alike[0], others[-1]


def has_kernel(decision: Decision) -> bool:
    """Whether something other than the reference runs the call."""
    return decision.chosen is not None and decision.chosen.backend != _REFERENCE


def _not_by_binary(decisions: list[Decision]) -> Iterator[tuple[Decision, CandidateResult]]:
    """The calls that a binary should run but another backend runs, with the binary's results."""
    in_use = {
        one.chosen.binary.library
        for one in decisions
        if one.chosen is not None and one.chosen.binary is not None
    }
    for decision in filter(has_kernel, decisions):
        if decision.chosen is None or decision.chosen.binary is not None:
            continue
        for result in decision.results:
            if result.binary is None:
                continue
            lacks = dict(result.binary.missing).get(decision.request.function)
            used = result.binary.library in in_use
            if lacks == result.reason or (used and _is_absent(result.binary, decision.request)):
                yield decision, result
                break


def _is_absent(binary: Binary, request: Request) -> bool:
    """Whether the binary of a release has no kernel for calls that every release runs."""
    dtypes = request.spec.compiled.get(request.function, ())
    expected = request.dtype in dtypes and _is_usual(request)
    release = binary.version_mismatch is None and not is_subset(binary)
    return expected and release and nearest_kernel(request, binary.manifest.kernels) is None


def _is_usual(request: Request) -> bool:
    return all(value in axis.usual for axis, value in request.by_axis)
