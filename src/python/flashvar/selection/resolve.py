"""Selection on this machine: chooses among the installed binaries and opens the chosen one."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

from flashvar import variables
from flashvar.binaries import loader, registry
from flashvar.errors import BackendUnavailableError, BinaryError, ManifestError
from flashvar.machine.system import System, gather, gather_for_cpu
from flashvar.selection.candidates import CandidateResult, Decision
from flashvar.selection.request import Overrides, Request
from flashvar.selection.rules import select

_log = logging.getLogger("flashvar")
# Outcomes already logged: a model gets one line, however many kinds of calls it makes.
_logged: set[object] = set()


@cache
def choose(request: Request, backend: str = "auto") -> CandidateResult:
    """The candidate that runs `request`, with its library open if it is a binary.

    Decided once per process for a request. FLASHVAR_BACKEND counts if `backend` is "auto".
    FLASHVAR_FORCE_ARCH always limits the binaries, and with "auto" also excludes Triton. If a
    fallback runs the request, the log says why, and how to change that if there is a way.

    Raises:
        InvalidInputError: no op has the function, or `backend` is not the name of a backend.
        BackendUnavailableError: no candidate runs the request; the message lists them all.
        ConfigurationError: an environment variable has no valid value.
        ManifestError: FLASHVAR_STRICT=1 and the chosen binary has another version.
    """
    variables.warn_of_misspelled()
    overrides = Overrides.from_environment(backend)
    system = gather_for_cpu() if request.device is None else gather()
    decision = _decide(request, system, overrides)
    if decision.chosen is None:
        raise BackendUnavailableError(_no_backend(decision, overrides.backend, backend != "auto"))
    _report(decision, decision.chosen, overrides.backend)
    return replace(decision.chosen, explicit=overrides.backend != "auto")


def _decide(request: Request, system: System, overrides: Overrides) -> Decision:
    """Select, and open the chosen binary; if it fails to open, reject it and select again."""
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
            inventory = registry.reject(binary, str(error))
            continue
        try:
            library.function(request.function)
        except BinaryError as error:
            inventory = registry.without_function(binary, request.function, str(error))
        else:
            return decision


def _no_backend(decision: Decision, backend: str, is_argument: bool) -> str:
    """The message of a call that nothing can run; `is_argument`: the call names `backend`."""
    request = decision.request
    wanted, others = "a backend that runs it", ""
    if backend != "auto":
        wanted = f"backend {backend!r} to run it"
        others = "leave backend out" if is_argument else "unset FLASHVAR_BACKEND"
        if request.device is None:
            others = f'move the tensors with .to("cuda"), or {others}'
        others = f"To run it, {others}. "
    axes = "".join(f" and {axis.words}" for axis in request.spec.axes)
    return (
        f"{request}: expected {wanted}, found:\n{decision.explain(backend)}\n"
        f"{others}`flashvar doctor` shows the backends for every device{axes}."
    )


def _report(decision: Decision, chosen: CandidateResult, backend: str) -> None:
    """Log which candidate runs a request, and the reason and fix of the best one that could not.

    Of the folders that FLASHVAR_LIB_DIR names, every one that the device could use, but for its
    reason, is in the log.
    """
    before = decision.results[: decision.results.index(chosen)]
    better = next((result for result in before if result.fix is not None), None)
    if chosen.binary is not None and better is not None and better.missing:
        better = None  # a compiled kernel for a lower architecture runs it
    is_fallback = backend == "auto" and decision.request.device is not None
    if better is None and is_fallback and chosen.binary is None:
        better = next(iter(before), None)  # the binary of the device's own architecture
    for result in decision.results:
        is_named = result.rejected is not None and result.rejected.folder.from_lib_dir
        if is_named and result.fix is not None and result is not better:
            _warn_once(result.reason, "%s; to change that: %s", result.reason, result.fix)
    if better is None:
        _log.debug("%s: runs on %s", decision.request, chosen.candidate)
        return
    log_fallback(decision.request, chosen, better.candidate, better.reason, better.fix)


def log_fallback(
    request: Request, chosen: CandidateResult, better: str, reason: str, fix: str | None
) -> None:
    """Warn, once for each outcome, that `chosen` runs a call in place of the candidate `better`."""
    _warn_once(
        (chosen.candidate, better, reason),
        "%s: runs on %s, not %s (%s)%s",
        *(request, chosen.candidate, better, reason, f"; to change that: {fix}" if fix else ""),
    )


def _warn_once(outcome: object, text: str, *words: object) -> None:
    if outcome not in _logged:
        _logged.add(outcome)
        _log.warning(text, *words)
