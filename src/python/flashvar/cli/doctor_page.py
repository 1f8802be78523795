"""The page of `flashvar doctor`: the conclusion, its facts, and the commands that help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flashvar import ops
from flashvar.binaries.kinds import BinaryKind, dotted
from flashvar.binaries.manifest import KernelRow, Rule
from flashvar.cli.diagnosis import Report, rules_of
from flashvar.cli.page import BAD, GOOD, PLAIN, QUIET, Page, Row, Section, Table, rows
from flashvar.cli.speed import OURS, Result, Speed, timed_ops
from flashvar.machine.system import System
from flashvar.selection.candidates import CandidateResult, Decision
from flashvar.selection.compatibility import values_of
from flashvar.selection.request import Request, kind_text

# Below this fraction of the recorded rate the GPU is slow; noise of the measurement is smaller.
_SLOW = 0.85


def page(report: Report) -> Page:
    """The whole report, one section per question."""
    return Page(
        summary=report.conclusion,
        tone=GOOD if report.healthy else BAD,
        sections=(
            Section("System", (_system(report),)),
            Section("Devices", _devices(report.system)),
            Section(
                "Binaries", _binaries(report), notes=(*_no_binary(report), *_never_run(report))
            ),
            Section("What runs", tuple(_answers(report.decisions))),
            *_families(report.decisions),
            *(() if report.speed is None else _speed(report.speed)),
        ),
        commands_title="To run something better",
        commands=report.fixes,
    )


def _system(report: Report) -> Table:
    system, overrides = report.system, report.overrides
    driver = None
    if system.driver_cuda is not None:
        driver = f"{system.driver_display or '?'}, supports CUDA {dotted(system.driver_cuda)}"
    built_for = (
        f"ROCm {system.torch_hip}" if system.torch_hip else f"CUDA {system.torch_cuda or 'none'}"
    )
    torch = "cannot be imported" if system.torch_repair else None
    if system.torch:
        torch = f"{system.torch}, built for {built_for}"
    shortened = system.visible_devices is not None
    facts = [
        ("python", f"{system.python} on {system.platform}"),
        ("torch", torch),
        ("triton", system.triton),
        ("C compiler", system.compiler),
        ("Python.h", system.python_headers),
        ("Triton cache", system.triton_cache or "cannot be written"),
        ("driver", driver),
    ]
    named = [
        *([("problem", system.problem)] if system.problem else []),
        *([("visible", f"CUDA_VISIBLE_DEVICES={system.visible_devices}")] * shortened),
        *([("backend", overrides.backend)] if overrides.backend != "auto" else []),
        *([("forced to", overrides.kind)] if overrides.kind else []),
    ]
    return Table(rows([*((key, value or "not found") for key, value in facts), *named]))


def _devices(system: System) -> tuple[Table, ...]:
    found = [
        (
            f"cuda:{device.index}",
            dotted(device.capability),
            f"{device.memory / 2**30:.1f} GiB",
            str(device.multiprocessors),
            f"{device.shared_memory / 1024:.0f} KiB",
            device.name + (" (Tegra)" if device.tegra else ""),
        )
        for device in system.devices
    ]
    heading = ("device", "capability", "memory", "SMs", "shared/block", "name")
    return (Table(rows(found), heading, numbers=frozenset({2, 3, 4})),) if found else ()


def _binaries(report: Report) -> tuple[Table, ...]:
    good = [
        (
            binary.kind.name,
            binary.manifest.version,
            binary.folder.origin,
            _holdings(binary.manifest.kernels)
            + (f"; {binary.version_mismatch}" if binary.version_mismatch else ""),
        )
        for binary in report.inventory.binaries
    ]
    bad = [
        (
            rejected.kind or "?",
            "",
            rejected.folder.origin,
            f"rejected: {rejected.reason}" + (f" -> {rejected.fix}" if rejected.fix else ""),
        )
        for rejected in report.inventory.rejected
    ]
    heading = ("kind", "version", "from", "state")
    found = (*rows(good), *rows(bad, BAD))
    return (Table(found, heading),) if found else ()


def _no_binary(report: Report) -> tuple[str, ...]:
    """A note, if there is no binary, that pip ignores unknown extras."""
    found, available = report.inventory, report.inventory.extras
    extras = sorted(available.here | available.elsewhere, key=BinaryKind.parse)
    if not extras or found.binaries or found.rejected:
        return ()
    return (f"pip ignores unknown extras; flashvar has the extras {', '.join(extras)}.",)


_NEVER_RUN = {
    "ptx": "has run on no GPU of its own architecture, only as PTX on another one",
    "never": "has never run on a GPU",
}


def _never_run(report: Report) -> Iterator[str]:
    """A note for each binary in use whose machine code nobody has seen run."""
    chosen = (one.chosen.binary for one in report.decisions if one.chosen is not None)
    for binary in dict.fromkeys(binary for binary in chosen if binary is not None):
        if binary.manifest.ran in _NEVER_RUN:
            yield (
                f"The code of {binary.kind.name} {_NEVER_RUN[binary.manifest.ran]}; "
                "`flashvar doctor --verify` checks it here, in a minute."
            )


def _holdings(held: tuple[KernelRow, ...]) -> str:
    """The dtypes and axis values that a binary holds, per function."""
    alike: dict[str, list[str]] = {}
    for function in dict.fromkeys(row.function for row in held):
        mine = [row for row in held if row.function == function]
        dtypes = ", ".join(sorted({row.dtype for row in mine if row.dtype is not None}))
        alike.setdefault(_joined(dtypes, _axis_values(function, mine)), []).append(function)
    return "; ".join(f"{', '.join(functions)} {what}" for what, functions in alike.items())


def _axis_values(function: str, rows: Sequence[KernelRow]) -> str:
    """The axis values of kernels in words; or that this flashvar does not know the function."""
    spec = ops.find(function)
    if spec is None:
        return "not known to this flashvar"
    return kind_text(spec.axes, *(one for row in rows if (one := values_of(spec, row)) is not None))


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _answers(decisions: Sequence[Decision]) -> Iterator[Table]:
    """One table per group of requests with the same results."""
    groups: dict[tuple[int | None, str, str], list[Decision]] = {}
    for decision in decisions:
        key = (decision.request.device, decision.request.function, decision.explain())
        groups.setdefault(key, []).append(decision)
    alike: dict[tuple[int | None, str, str], list[Decision]] = {}
    for (device, _, trace), members in groups.items():
        dtypes = ", ".join(dict.fromkeys(one.request.dtype for one in members))
        what = _joined(dtypes, _asked(one.request for one in members))
        alike.setdefault((device, what, trace), []).append(members[0])
    for (device, what, _), firsts in alike.items():
        where = "CPU" if device is None else f"cuda:{device}"
        functions = ", ".join(one.request.function for one in firsts)
        chosen = firsts[0].chosen.candidate if firsts[0].chosen else "nothing"
        yield Table(_trace(firsts[0]), caption=f"{where}  {functions} {what}: {chosen}")


def _asked(requests: Iterable[Request]) -> str:
    """The axis values of requests for one function, in words."""
    every = list(requests)
    return kind_text(every[0].spec.axes, *(one.axes for one in every))


def _families(decisions: Sequence[Decision]) -> Iterator[Section]:
    """Which calls launch which instruction family; empty if every decision has one family."""
    alike: dict[tuple[str, str, str, tuple[Rule, ...]], list[Request]] = {}
    for one in decisions:
        if one.chosen is not None and (rules := rules_of(one)):
            key = (one.chosen.candidate, one.request.function, one.request.dtype, rules)
            alike.setdefault(key, []).append(one.request)
    if all(len(rules) == 1 for *_, rules in alike):
        return
    dtypes_of: dict[tuple[str, str, str, tuple[Rule, ...]], list[str]] = {}
    for (candidate, function, dtype, rules), requests in alike.items():
        dtypes_of.setdefault((candidate, function, _asked(requests), rules), []).append(dtype)
    tables = []
    for (candidate, function, kinds, rules), dtypes in dtypes_of.items():
        caption = f"{candidate}  {function} {_joined(', '.join(dtypes), kinds)}"
        lines = rows([(rule.family, rule.when) for rule in rules])
        tables.append(Table(lines, caption=caption))
    yield Section("Inside the binary", tuple(tables))


def _trace(decision: Decision) -> tuple[Row, ...]:
    return tuple(_row(result, decision) for result in decision.results)


def _row(result: CandidateResult, decision: Decision) -> Row:
    if not result.accepted:
        fix = f" -> {result.fix}" if result.fix else ""
        return Row((result.candidate, "no", result.reason + fix), PLAIN if fix else QUIET)
    if result is decision.chosen and decision.error is not None:
        return Row((result.candidate, "raises", decision.error), BAD)
    if result is decision.chosen:
        tone = PLAIN if result.backend == "reference" else GOOD
        return Row((result.candidate, "chosen", result.reason), tone)
    return Row((result.candidate, "available", result.reason), QUIET)


def _speed(speed: Speed) -> Iterator[Section]:
    """A section per op: its rates, the recorded rates and those of its peers."""
    for name, op in timed_ops().items():
        if speed.why is not None:
            yield Section(op.TITLE, otherwise=f"not measured: {speed.why}")
            continue
        results = [one for one in speed.results if one.op == name]
        heading = ("", OURS, "recorded", *op.PEERS.values(), "runs with")
        found = [_rates(speed, one, tuple(op.PEERS)) for one in results]
        table = Table(rows(found), heading, numbers=frozenset(range(1, len(heading) - 1)))
        notes = (op.NOTE, *_record(speed, results), *_failures(results, op.PEERS))
        yield Section(op.TITLE, (table,), notes=notes)


def _rates(speed: Speed, result: Result, peers: tuple[str, ...]) -> tuple[str, ...]:
    recorded = _rate(speed.recorded(result).get(OURS))
    ratio = speed.ratio(result)
    if ratio is not None:
        recorded += f" ({ratio:.0%})"
    theirs = (_rate(result.rates.get(name)) for name in peers)
    return (result.cell.name, _rate(result.rates.get(OURS)), recorded, *theirs, result.candidate)


def _rate(found: float | None) -> str:
    return "-" if found is None else f"{found:.0f}" if found >= 10 else f"{found:.2f}"


def _record(speed: Speed, results: Sequence[Result]) -> Iterator[str]:
    if speed.record is None or not any(map(speed.recorded, results)):
        yield f"Nothing is recorded for {speed.gpu}."
        return
    record = speed.record
    yield (
        f"Recorded on {record.gpu} on {record.time[:10]}, "
        f"torch {record.torch}, driver {record.driver}."
    )
    ratios = [ratio for one in results if (ratio := speed.ratio(one)) is not None]
    if ratios and min(ratios) < _SLOW:
        yield (
            "Slower than recorded: look for other work on this GPU, for its clocks and power "
            "limit (nvidia-smi -q -d CLOCK,POWER), and check above which candidate runs the calls."
        )


def _failures(results: Sequence[Result], peers: Mapping[str, str]) -> Iterator[str]:
    """The reasons why calls were not timed, each once."""
    reasons = (
        f"{peers.get(name, name)}: {why}" for one in results for name, why in one.failures.items()
    )
    yield from dict.fromkeys(reasons)
