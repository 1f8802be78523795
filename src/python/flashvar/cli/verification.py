"""Makes the calls of `doctor --verify` on a CUDA device and compares them with the reference."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Final

import torch

from flashvar.cli import progress
from flashvar.cli.diagnosis import Report
from flashvar.cli.fallbacks import has_kernel
from flashvar.cli.verify import SECONDS, Case, Checked, Verification, verified_ops
from flashvar.errors import BackendUnavailableError
from flashvar.ops.dtypes import DTYPES, dtype_of
from flashvar.selection.candidates import Decision

_SEED: Final = 20

Outputs = dict[str, torch.Tensor]


def check(report: Report, number: int, *, seconds: float = SECONDS) -> Verification:
    """Check the ops on `cuda:number`, those that compiled kernels run first.

    Raises:
        BackendUnavailableError: torch sees no such device.
    """
    device = report.system.device(number)
    if device is None:
        why = report.system.problem or "torch sees none"
        raise BackendUnavailableError(
            f"doctor --verify checks kernels on a GPU and found no cuda:{number} ({why}): "
            "`flashvar doctor` says what is missing"
        )
    mine = [one for one in report.decisions if one.request.device == number]
    kinds = _kinds(mine)
    modules = verified_ops()
    names = list(dict.fromkeys(one.request.spec.name for one in mine))
    unchecked = tuple(name for name in names if name not in {op for op, _ in kinds})
    checked, left, start = [], 0, time.monotonic()
    with torch.cuda.device(number):
        for op, decision in progress.follow(kinds, _words):
            request = decision.request
            random = torch.Generator().manual_seed(_SEED)
            for case in modules[op].cases(dtype_of(request.dtype), request.axes, random):
                if time.monotonic() - start > seconds:
                    left += 1
                    continue
                candidate = decision.chosen.candidate if decision.chosen else ""
                checked.append(check_case(op, case, candidate, torch.device("cuda", number)))
    return Verification(device, tuple(checked), left, unchecked)


def _kinds(decisions: list[Decision]) -> list[tuple[str, Decision]]:
    """The kinds of calls to check: a kind of each op in turn, until there are no more."""
    modules = verified_ops()
    by_op: dict[str, list[Decision]] = {name: [] for name in modules}
    for one in decisions:
        spec = one.request.spec
        first = one.request.function == spec.functions[0]
        known = spec.name in modules and one.request.dtype in DTYPES.values()
        if first and known and has_kernel(one):
            by_op[spec.name].append(one)
    for held in by_op.values():
        held.sort(key=lambda one: one.chosen is None or one.chosen.backend != "cuda")
    pairs = ([(name, one) for one in held] for name, held in by_op.items())
    return [pair for pair in chain.from_iterable(zip_longest(*pairs)) if pair is not None]


def _words(kind: tuple[str, Decision]) -> str:
    return str(kind[1].request)


def check_case(op: str, case: Case, candidate: str, device: torch.device) -> Checked:
    """Make a call on the device and, in float64, on the CPU; compare all results."""
    try:
        found = _results(case, {name: one.to(device) for name, one in case.inputs.items()})
    except BackendUnavailableError as error:
        if case.leaves:  # the gradients may have no kernel here, which `doctor` says
            forward = replace(case, name=f"{case.name} forward", leaves=())
            return check_case(op, forward, candidate, device)
        return _raised(op, case, candidate, error)
    except Exception as error:  # whatever a launch raises is an outcome
        return _raised(op, case, candidate, error)
    exact = {
        name: one.double() if one.is_floating_point() else one for name, one in case.inputs.items()
    }
    rounding = case.roundings * max(
        torch.finfo(one.dtype).eps for one in case.inputs.values() if one.is_floating_point()
    )
    ratios = dict(_ratios(found, _results(case, exact), rounding))
    worst = max(ratios, key=lambda name: ratios[name])
    return Checked(op, case.name, candidate, ratios[worst], worst)


def _raised(op: str, case: Case, candidate: str, error: Exception) -> Checked:
    words = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Checked(op, case.name, candidate, 0.0, "", words)


def _results(case: Case, inputs: Mapping[str, torch.Tensor]) -> Outputs:
    """The results of a call, and the gradients of its leaves for fixed gradients of the results."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in case.leaves}
    results = case.call({**inputs, **leaves})
    found = {f"result {number}": one.detach() for number, one in enumerate(results, 1)}
    if leaves:
        grads = [_grad_of(one, number) for number, one in enumerate(results)]
        given = torch.autograd.grad(results, list(leaves.values()), grads)
        found |= {f"gradient of {name}": one for name, one in zip(leaves, given, strict=True)}
    return found


def _grad_of(result: torch.Tensor, number: int) -> torch.Tensor:
    """A gradient that every dtype has exactly: of the signs of a fixed sequence."""
    random = torch.Generator().manual_seed(_SEED + 1 + number)
    signs = torch.randint(0, 2, result.shape, generator=random) * 2 - 1
    return signs.to(result)


def _ratios(found: Outputs, exact: Outputs, rounding: float) -> Iterator[tuple[str, float]]:
    """The largest difference of each result, as a part of what is allowed; infinite for NaN."""
    for name, one in found.items():
        wanted = exact[name].double()
        scale = float(wanted.square().mean().sqrt())
        allowed = rounding * (1 + name.startswith("gradient"))
        difference = float((one.cpu().double() - wanted).abs().max()) if one.numel() else 0.0
        ratio = difference / (allowed * scale) if scale else difference
        yield name, ratio if ratio == ratio else float("inf")
