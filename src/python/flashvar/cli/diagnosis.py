"""What would run on a machine, for every request worth asking about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

from flashvar import loader
from flashvar._version import __version__
from flashvar.registry import Binary, Inventory, Refusal
from flashvar.selection import Decision, Overrides, Request, Verdict, select
from flashvar.system import System, gather

# Asked about even where nothing is installed: what almost every model needs.
_USUAL_OP: Final = "attention_fwd"
_USUAL_DTYPES: Final = ("bf16", "fp16")
_USUAL_HEAD_DIMS: Final = (64, 128)


@dataclass(frozen=True)
class Report:
    """The facts, and a decision for each request."""

    system: System
    inventory: Inventory
    overrides: Overrides
    decisions: tuple[Decision, ...]

    @property
    def healthy(self) -> bool:
        """Whether something other than the reference would run."""
        return any(one.chosen and one.chosen.backend != "reference" for one in self.decisions)

    @property
    def fixes(self) -> tuple[str, ...]:
        """The commands that would make something better run, each once."""
        found = (
            verdict.fix for decision in self.decisions for verdict in _better_than_chosen(decision)
        )
        return tuple(dict.fromkeys(fix for fix in found if fix is not None))

    @property
    def conclusion(self) -> str:
        """The whole report in one sentence."""
        backends = [one.chosen.backend if one.chosen else "" for one in self.decisions]
        if not self.system.devices:
            why = self.system.problem or "torch sees no CUDA device"
            return f"Only the CPU reference runs: {why}."
        if not self.healthy:
            return "No backend but the reference serves this machine."
        if all(backend == "cuda" for backend in backends):
            return "Compiled kernels serve everything asked about."
        if all(backend == "triton" for backend in backends):
            return "Triton serves everything asked about."
        counts = ", ".join(
            f"{backend or 'nothing'} {backends.count(backend)}"
            for backend in dict.fromkeys(backends)
        )
        return f"Of {len(backends)} requests asked about: {counts}."

    def to_json(self) -> str:
        """The report for machines."""
        document = {
            "schema": 1,
            "version": __version__,
            "healthy": self.healthy,
            "conclusion": self.conclusion,
            "fixes": self.fixes,
            "overrides": asdict(self.overrides),
            "system": asdict(self.system),
            "binaries": [_binary_to_json(binary) for binary in self.inventory.binaries],
            "refused": [_refusal_to_json(refusal) for refusal in self.inventory.refusals],
            "requests": [_decision_to_json(decision) for decision in self.decisions],
        }
        return json.dumps(document, indent=1) + "\n"


def examine_this_machine() -> Report:
    """Gather, open every binary once, and decide; ConfigurationError on a bad environment."""
    return examine(gather(), loader.open_all(), Overrides.from_environment())


def examine(system: System, inventory: Inventory, overrides: Overrides) -> Report:
    """Decide everything worth asking about; pure."""
    decisions = tuple(
        select(request, system, inventory, overrides) for request in questions(system, inventory)
    )
    return Report(system, inventory, overrides, decisions)


def questions(system: System, inventory: Inventory) -> Iterator[Request]:
    """Every kernel of the installed manifests and the usual ones, on every device or the CPU."""
    rows = [row for binary in inventory.binaries for row in binary.manifest.kernels]
    usual = product((_USUAL_OP,), _USUAL_DTYPES, _USUAL_HEAD_DIMS)
    kinds = {(row.op, row.dtype or "", row.head_dim) for row in rows} | set(usual)
    in_order = sorted(kinds, key=lambda kind: (kind[0], kind[1], kind[2] or 0))
    devices: list[int | None] = [device.index for device in system.devices]
    for device, (op, dtype, head_dim) in product(devices or [None], in_order):
        yield Request(op, dtype, device, head_dim)


def _better_than_chosen(decision: Decision) -> tuple[Verdict, ...]:
    if decision.chosen is None:
        return decision.verdicts
    return decision.verdicts[: decision.verdicts.index(decision.chosen)]


def _binary_to_json(binary: Binary) -> dict[str, Any]:
    manifest = binary.manifest
    return {
        "architecture": binary.architecture.name,
        "code": binary.architecture.code,
        "version": manifest.version,
        "origin": binary.candidate.origin,
        "directory": str(binary.candidate.directory),
        "skew": binary.skew,
        "revision": manifest.source.revision,
        "kernels": [row.name for row in manifest.kernels],
    }


def _refusal_to_json(refusal: Refusal) -> dict[str, Any]:
    return {
        "architecture": refusal.architecture,
        "origin": refusal.candidate.origin,
        "directory": str(refusal.candidate.directory),
        "reason": refusal.reason,
        "fix": refusal.fix,
    }


def _decision_to_json(decision: Decision) -> dict[str, Any]:
    request, chosen = decision.request, decision.chosen
    return {
        "op": request.op,
        "dtype": request.dtype,
        "head_dim": request.head_dim,
        "device": request.device,
        "chosen": chosen.candidate if chosen else None,
        "backend": chosen.backend if chosen else None,
        "kernel": chosen.kernel.name if chosen and chosen.kernel else None,
        "verdicts": [
            {
                "candidate": verdict.candidate,
                "backend": verdict.backend,
                "accepted": verdict.accepted,
                "reason": verdict.reason,
                "fix": verdict.fix,
            }
            for verdict in decision.verdicts
        ],
    }
