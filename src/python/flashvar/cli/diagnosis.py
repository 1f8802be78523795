"""The diagnosis of a machine: its facts, and the decision for every relevant request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import product
from typing import Any, Final

from flashvar import ops
from flashvar._version import __version__
from flashvar.binaries import loader
from flashvar.binaries.manifest import KernelRow, Rule
from flashvar.binaries.registry import Binary, Inventory, RejectedFolder
from flashvar.cli.fallbacks import NOTHING, Fallback, fallbacks, has_kernel
from flashvar.cli.speed import Speed
from flashvar.machine.system import System, gather
from flashvar.ops.op import OpSpec, Value, value_text
from flashvar.selection.candidates import CandidateResult, Decision
from flashvar.selection.compatibility import values_of
from flashvar.selection.request import Overrides, Request
from flashvar.selection.rules import select

# The schema of `Report.to_json`. Not a path: flashvar may run from an archive.
SCHEMA_FILE: Final = resources.files(__package__) / "doctor.schema.json"
SCHEMA: Final = 2


@dataclass(frozen=True)
class Report:
    """The facts, and a decision for each request."""

    system: System
    inventory: Inventory
    overrides: Overrides
    decisions: tuple[Decision, ...]
    speed: Speed | None = None  # None: not asked for

    @property
    def errors(self) -> tuple[str, ...]:
        """The errors of calls for which a binary was chosen, each once."""
        return tuple(dict.fromkeys(one.error for one in self.decisions if one.error is not None))

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The functions of ops that run on a slower backend than installed binaries allow."""
        return fallbacks(self.decisions)

    @property
    def healthy(self) -> bool:
        """Whether every function of every op runs on every device as it should."""
        return self._has_kernels and not self.errors and not self.fallbacks

    @property
    def _has_kernels(self) -> bool:
        """Whether something other than the reference runs any call."""
        return any(map(has_kernel, self.decisions))

    @property
    def fixes(self) -> tuple[str, ...]:
        """The commands after which something better would run, each once."""
        found = (
            result.fix for decision in self.decisions for result in _better_than_chosen(decision)
        )
        every = (_fix_of_machine(self.system), *found)
        return tuple(dict.fromkeys(fix for fix in every if fix is not None))

    @property
    def conclusion(self) -> str:
        """The whole report in a sentence, and one for each fallback."""
        if self.errors:
            return f"{self._failing}: {self.errors[0]}"
        backends = [one.chosen.backend if one.chosen else "" for one in self.decisions]
        if self.system.torch is None:
            return f"No call runs: {self.system.problem or 'torch is not installed'}."
        if not self.system.devices and not self._has_kernels:
            return f"Only the CPU reference runs: {_why_no_device(self.system)}."
        if not self._has_kernels:
            return "No backend but the reference runs on this machine."
        if all(backend == "cuda" for backend in backends):
            return "Compiled kernels run every kind of call."
        if all(backend == "triton" for backend in backends):
            return "Triton runs every kind of call."
        shares = ", ".join(map(self._runs_with, dict.fromkeys(backends)))
        first = f"Of {len(backends)} kinds of calls: {shares}."
        return " ".join((first, *(f"{one}." for one in self.fallbacks)))

    def _runs_with(self, backend: str) -> str:
        """How many requests a backend runs, and of which ops if not of all."""
        mine = [
            one.request
            for one in self.decisions
            if (one.chosen.backend if one.chosen else "") == backend
        ]
        names = dict.fromkeys(one.spec.name for one in mine)
        every = {one.request.spec.name for one in self.decisions}
        of_ops = "" if len(names) == len(every) else f" ({', '.join(names)})"
        return f"{backend or NOTHING} {len(mine)}{of_ops}"

    @property
    def _failing(self) -> str:
        """The calls that raise, in words: all or some calls on some devices."""
        failing = [one.request.device for one in self.decisions if one.error is not None]
        devices = [one.request.device for one in self.decisions]
        every = all(devices.count(one) == failing.count(one) for one in failing)
        where = ", ".join(f"cuda:{device}" for device in dict.fromkeys(failing))
        return f"{'Calls' if every else 'Some calls'} on {where} fail, those on the CPU run"

    def to_json(self) -> str:
        """The report as JSON."""
        document = {
            "schema": SCHEMA,
            "version": __version__,
            "healthy": self.healthy,
            "conclusion": self.conclusion,
            "errors": self.errors,
            "fallbacks": [asdict(one) for one in self.fallbacks],
            "fixes": self.fixes,
            "overrides": asdict(self.overrides),
            "system": asdict(self.system),
            "binaries": [_binary_to_json(binary) for binary in self.inventory.binaries],
            "rejected": [_rejected_to_json(rejected) for rejected in self.inventory.rejected],
            "requests": [_decision_to_json(decision) for decision in self.decisions],
            "bench": None if self.speed is None else self.speed.to_json(),
        }
        return json.dumps(document, indent=1) + "\n"


def examine_this_machine() -> Report:
    """The report on this machine; opens every binary.

    Raises:
        ConfigurationError: an environment variable has no valid value.
    """
    overrides = Overrides.from_environment()
    return examine(gather(), loader.open_all(), overrides)


def examine(system: System, inventory: Inventory, overrides: Overrides) -> Report:
    """The report on given facts: the decision for each of `questions`; pure."""
    decisions = tuple(
        select(request, system, inventory, overrides) for request in questions(system, inventory)
    )
    return Report(system, inventory, overrides, decisions)


def questions(system: System, inventory: Inventory) -> Iterator[Request]:
    """A request per installed kernel and per usual kernel, on every device or else the CPU."""
    rows = [row for binary in inventory.binaries for row in binary.manifest.kernels]
    devices: list[int | None] = [device.index for device in system.devices]
    for device, spec in product(devices or [None], ops.specs()):
        for function in spec.functions:
            kinds = {*_usual(spec), *_held(spec, [row for row in rows if row.function == function])}
            for dtype, axes in sorted(kinds):
                yield Request(function, dtype, device, axes)


def _usual(spec: OpSpec) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """The dtypes and axis values of most models; requested even if no binary is installed."""
    yield from product(spec.usual_dtypes, product(*(axis.usual for axis in spec.axes)))


def _held(spec: OpSpec, rows: list[KernelRow]) -> Iterator[tuple[str, tuple[Value, ...]]]:
    for row in rows:
        values = values_of(spec, row)
        if values is not None:
            yield row.dtype or "", values


def rules_of(decision: Decision) -> tuple[Rule, ...]:
    """The instruction families of a decision's kernel; empty if no compiled kernel runs it."""
    if decision.chosen is None or decision.chosen.kernel is None:
        return ()
    return decision.chosen.kernel.rules


def _why_no_device(system: System) -> str:
    if system.problem is not None:
        return system.problem
    why = "torch sees no CUDA device"
    if system.driver_cuda is None and system.torch_hip is None:
        return f"{why}, and no NVIDIA driver is found"
    if system.visible_devices is not None:
        return f"{why}, CUDA_VISIBLE_DEVICES is {system.visible_devices!r}"
    return why


def _fix_of_machine(system: System) -> str | None:
    """The step after which torch sees the device; None if no device seems to be present."""
    if system.torch is None:
        return system.torch_repair or "pip install torch"
    if system.devices or system.torch_hip is not None or system.driver_cuda is None:
        return None
    if system.torch_cuda is None:
        return f"install a torch built for CUDA; torch {system.torch} is CPU-only"
    major, supported = int(system.torch_cuda.split(".")[0]), system.driver_cuda[0]
    if major <= supported:
        return None if system.visible_devices is None else "unset CUDA_VISIBLE_DEVICES"
    return (
        f"update the NVIDIA driver to one that supports CUDA {system.torch_cuda}, "
        f"or install a torch built for CUDA {supported}"
    )


def _better_than_chosen(decision: Decision) -> tuple[CandidateResult, ...]:
    if decision.chosen is None:
        return decision.results
    return decision.results[: decision.results.index(decision.chosen)]


def _binary_to_json(binary: Binary) -> dict[str, Any]:
    manifest = binary.manifest
    return {
        "kind": binary.kind.name,
        "code": binary.architecture.code,
        "version": manifest.version,
        "origin": binary.folder.origin,
        "directory": str(binary.folder.path),
        "version_mismatch": binary.version_mismatch,
        "revision": manifest.source.revision,
        "driver": manifest.minimum_driver.display,
        "ran": manifest.ran,
        "kernels": [row.name for row in manifest.kernels],
    }


def _rejected_to_json(rejected: RejectedFolder) -> dict[str, Any]:
    return {
        "kind": rejected.kind,
        "origin": rejected.folder.origin,
        "directory": str(rejected.folder.path),
        "reason": rejected.reason,
        "fix": rejected.fix,
    }


def _decision_to_json(decision: Decision) -> dict[str, Any]:
    request, chosen = decision.request, decision.chosen
    return {
        "function": request.function,
        "dtype": request.dtype,
        "axes": {axis.name: value_text(value) for axis, value in request.by_axis},
        "device": request.device,
        "chosen": chosen.candidate if chosen else None,
        "backend": chosen.backend if chosen else None,
        "kernel": chosen.kernel.name if chosen and chosen.kernel else None,
        "families": [asdict(rule) for rule in rules_of(decision)],
        "candidates": [
            {
                "candidate": result.candidate,
                "backend": result.backend,
                "accepted": result.accepted,
                "reason": result.reason,
                "fix": result.fix,
            }
            for result in decision.results
        ],
    }
