"""`flashvar warmup`: compiles the Triton kernels of a model before its first request."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from flashvar import ops
from flashvar.binaries import loader
from flashvar.binaries.kinds import Architecture
from flashvar.binaries.registry import Inventory
from flashvar.cli import progress, screen
from flashvar.cli.page import BAD, GOOD, QUIET, Page, Row, Section, Table, counted
from flashvar.errors import BackendUnavailableError, ConfigurationError
from flashvar.machine.shared_memory import SHARED_MEMORY
from flashvar.machine.system import Device, System, gather
from flashvar.selection.request import Overrides, Request
from flashvar.selection.rules import select

_SCHEMA: Final = 1
_KIND, _KINDS = "kind of call", "kinds of calls"
_READY, _NOT_NEEDED, _FAILED = "ready", "not needed", "failed"
_TONES: Final = {_READY: GOOD, _NOT_NEEDED: QUIET, _FAILED: BAD}


class Kind(Protocol):
    """Calls of an op that use the same kernels."""

    def __str__(self) -> str:
        """The kind in words."""
        ...

    @property
    def triton_too(self) -> bool:
        """Whether Triton runs some of such calls where a binary is installed."""
        ...

    def requests(self, device: int) -> tuple[Request, ...]:
        """The selection requests of such a call."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The kind for --json."""
        ...


class OpWarmup(Protocol):
    """The contents of the module `OpSpec.warmup` of an op."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that select calls."""
        ...

    def kinds(self, chosen: argparse.Namespace) -> Sequence[Kind]:
        """The kinds of calls that the options select."""
        ...

    def compile_here(self, kind: Any, device: int) -> None:
        """Compile the kernels of a kind of call on `cuda:device`."""
        ...

    def compile_for(self, kind: Any, capability: tuple[int, int]) -> None:
        """Compile the kernels of a kind of call for a GPU that is not in this machine."""
        ...


def warmed_ops() -> dict[str, OpWarmup]:
    """The modules of the ops that have Triton kernels to compile, by op."""
    return ops.modules("warmup")


@dataclass(frozen=True)
class WarmupOptions:
    """The calls of a model, from the command line."""

    kinds: tuple[Kind, ...]
    op: str
    architecture: str | None = None  # of a GPU that is not in this machine
    device: int = 0
    everything: bool = False  # also calls that compiled kernels run


@dataclass
class Outcome:
    """The result for one kind of call."""

    kind: Kind
    state: str
    detail: str
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The outcome for --json."""
        return {
            **self.kind.to_json(),
            "state": self.state,
            "detail": self.detail,
            "seconds": self.seconds,
        }


@dataclass
class Report:
    """All outcomes on one GPU."""

    target: str
    folder: str | None
    outcomes: list[Outcome] = field(default_factory=list)
    added: int = 0  # kernels in the folder that were not there before

    @property
    def seconds(self) -> float:
        """The time that compiling took."""
        return sum(one.seconds for one in self.outcomes)

    def count(self, state: str) -> int:
        """The number of kinds of calls in a state."""
        return sum(one.state == state for one in self.outcomes)


def run(options: WarmupOptions, *, as_json: bool, system: System | None = None) -> int:
    """Compile the missing kernels and print the outcomes; returns 1 if some cannot be compiled.

    Raises:
        BackendUnavailableError: no Triton, or no such device.
        ConfigurationError: an unknown architecture.
    """
    system = system or gather()
    if system.triton is None:
        raise BackendUnavailableError(
            "warming up needs Triton, which is not installed: pip install triton"
        )
    if system.interpreted:
        raise BackendUnavailableError(
            "warming up compiles kernels, found TRITON_INTERPRET=1, which turns that off: unset it"
        )
    device = _device(options, system)
    before = _kernels(system.triton_cache)
    report = Report(_target(options, device), system.triton_cache)
    wanted = []
    for kind in options.kinds:
        outcome = _outcome_of(kind, options, system, device)
        report.outcomes.append(outcome)
        if outcome.state == _READY:
            wanted.append(outcome)
    for outcome in progress.follow(wanted, lambda one: str(one.kind), quiet=as_json):
        _compile(outcome, options, device)
    report.added = len(_kernels(system.triton_cache) - before)
    if as_json:
        print(json.dumps(_document(report), indent=1))
    else:
        screen.show(page(report))
    return 1 if report.count(_FAILED) else 0


def page(report: Report) -> Page:
    """The page of the outcomes."""
    failed, ready, not_needed = map(report.count, (_FAILED, _READY, _NOT_NEEDED))
    if failed:
        summary = f"Of {counted(len(report.outcomes), _KIND, _KINDS)} {failed} cannot be compiled."
    elif not ready:
        summary = "Nothing to compile: Triton runs none of the calls asked for."
    else:
        summary = f"Ready: {counted(ready, _KIND, _KINDS)}, after {report.seconds:.1f} s."
    rows = tuple(Row((str(one.kind), one.detail), _TONES[one.state]) for one in report.outcomes)
    notes = [
        *([f"Added to {report.folder}: {counted(report.added, 'kernel')}."] if ready else []),
        *(["With --all Triton also compiles the kernels of these calls."] if not_needed else []),
    ]
    calls = Section(f"Calls on {report.target}", (Table(rows),), notes=tuple(notes))
    return Page(summary, BAD if failed else GOOD, (calls,))


def _device(options: WarmupOptions, system: System) -> Device:
    if options.architecture is None:
        device = system.device(options.device)
        if device is None:
            raise BackendUnavailableError(
                f"warming up needs a CUDA device, and torch sees no cuda:{options.device}: "
                "pass --arch sm_XY to compile without the GPU"
            )
        return device
    try:
        capability = Architecture.parse(options.architecture).capability
        shared_memory = SHARED_MEMORY[capability]
    except (ValueError, KeyError):
        known = ", ".join(Architecture(*one).name for one in SHARED_MEMORY)
        raise ConfigurationError(
            f"--arch: expected one of {known}, found {options.architecture!r}: correct it, or run "
            "warmup on the machine with the GPU"
        ) from None
    return Device(0, "a GPU that is not in this machine", capability, shared_memory, 0, 0)


def _target(options: WarmupOptions, device: Device) -> str:
    if options.architecture is not None:
        return f"{Architecture(*device.capability).name}, compiled without the GPU"
    return f"cuda:{device.index}, {device.name}"


def _outcome_of(kind: Kind, options: WarmupOptions, system: System, device: Device) -> Outcome:
    """Whether Triton runs a kind of call, a compiled kernel does, or nothing can."""
    overrides, inventory = Overrides.from_environment(), Inventory()
    if options.architecture is not None:
        # The C launcher is compiled at the first call, on the machine with the GPU.
        system = replace(system, devices=(device,), compiler="", python_headers="", torch_hip=None)
        overrides = Overrides("triton")
    elif options.everything:
        overrides = Overrides("triton")
    else:
        inventory = loader.open_all()
    candidate = ""
    for request in kind.requests(device.index):
        decision = select(request, system, inventory, overrides)
        if decision.chosen is None:
            triton = next(one for one in decision.results if one.backend == "triton")
            return Outcome(kind, _FAILED, triton.reason)
        if decision.error is not None:
            return Outcome(kind, _FAILED, decision.error)
        if decision.chosen.backend == "triton":
            return Outcome(kind, _READY, "")
        candidate = decision.chosen.candidate
        may_fall_back = decision.chosen.backend == "cuda" and not decision.chosen.explicit
        serves = any(one.backend == "triton" and one.accepted for one in decision.results)
        if kind.triton_too and may_fall_back and serves:
            return Outcome(kind, _READY, "")
    return Outcome(kind, _NOT_NEEDED, f"{candidate} runs it")


def _compile(outcome: Outcome, options: WarmupOptions, device: Device) -> None:
    op = warmed_ops()[options.op]
    start = time.perf_counter()
    try:
        if options.architecture is None:
            op.compile_here(outcome.kind, device.index)
        else:
            op.compile_for(outcome.kind, device.capability)
    except Exception as error:  # the compiler and the launch may raise anything
        outcome.state = _FAILED
        outcome.detail = (str(error).strip().splitlines() or [type(error).__name__])[0]
    else:
        outcome.seconds = round(time.perf_counter() - start, 2)
        outcome.detail = f"{outcome.seconds:.1f} s"


def _kernels(folder: str | None) -> set[Path]:
    """The files of device code in Triton's cache, for NVIDIA and AMD."""
    if folder is None:
        return set()
    return {file for kind in ("cubin", "hsaco") for file in Path(folder).glob(f"*/*.{kind}")}


def _document(report: Report) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "target": report.target,
        "cache": report.folder,
        "kernels_added": report.added,
        "seconds": round(report.seconds, 2),
        "calls": [one.to_json() for one in report.outcomes],
    }
