"""Which kernel serves a request on this machine: selection, proved by opening what it chose.

Callers keep the answer per request; nothing here is fast.
"""

from __future__ import annotations

import logging

from flashvar.binaries import loader, registry
from flashvar.errors import BackendUnavailableError, BinaryError, ManifestError
from flashvar.machine.system import System, gather, gather_for_cpu
from flashvar.ops.op import OpSpec
from flashvar.selection.candidates import CandidateResult, Decision
from flashvar.selection.request import Overrides, Request
from flashvar.selection.rules import NOT_INSTALLED, select

_log = logging.getLogger("flashvar")
# What was logged: one line for a whole model, however many kinds of calls it makes.
_said: set[tuple[str, str, str]] = set()


def choose(request: Request, backend: str = "auto") -> CandidateResult:
    """The candidate that serves `request`, with its library open if it is a binary.

    `backend` is completed by FLASHVAR_BACKEND and FLASHVAR_FORCE_ARCH. Says in the log what a
    fallback was chosen over and how to change that.

    Raises:
        InvalidInputError: no op has the function.
        BackendUnavailableError: nothing serves it; the message lists every candidate.
        ConfigurationError: an environment variable or `backend` has no valid value.
        ManifestError: FLASHVAR_STRICT=1 and the chosen binary is of another version.
    """
    spec = request.spec
    overrides = Overrides.from_environment(backend)
    system = gather_for_cpu() if request.device is None else gather()
    decision = _decide(request, system, overrides)
    if decision.chosen is None:
        wanted = "a backend" if overrides.backend == "auto" else f"backend {overrides.backend!r}"
        raise BackendUnavailableError(
            f"{request}: expected {wanted} that serves it, found:\n{decision.explain()}\n"
            f"`flashvar doctor` shows this for every device{_every(spec)}."
        )
    _report(decision, decision.chosen)
    return decision.chosen


def _decide(request: Request, system: System, overrides: Overrides) -> Decision:
    """Select among the installed binaries, opening the chosen one; whatever fails is refused."""
    inventory = registry.installed()
    while True:
        decision = select(request, system, inventory, overrides)
        if decision.chosen is None or decision.chosen.binary is None:
            return decision
        if decision.error is not None:
            raise ManifestError(decision.error)
        binary = decision.chosen.binary
        try:
            library = loader.load(binary)
        except BinaryError as error:
            inventory = registry.refuse(binary, str(error))
            continue
        try:
            library.function(request.function)
        except BinaryError as error:
            inventory = registry.lacks(binary, request.function, str(error))
        else:
            return decision


def _every(spec: OpSpec) -> str:
    return "".join(f" and {axis.words}" for axis in spec.axes)


def _report(decision: Decision, chosen: CandidateResult) -> None:
    """One log line: what serves, and what keeps the best of the others from serving."""
    better = decision.results[: decision.results.index(chosen)]
    lost = next((result for result in better if result.fix is not None), None)
    # A binary for another architecture stands by; only what was meant for this device is missed.
    if lost is None or (chosen.backend == "cuda" and lost.reason == NOT_INSTALLED):
        _log.debug("%s: %s serves", decision.request, chosen.candidate)
        return
    said = (chosen.candidate, lost.candidate, lost.reason)
    if said in _said:
        return
    _said.add(said)
    _log.warning(
        "%s: %s serves, not %s (%s); to change that: %s",
        decision.request,
        chosen.candidate,
        lost.candidate,
        lost.reason,
        lost.fix,
    )
