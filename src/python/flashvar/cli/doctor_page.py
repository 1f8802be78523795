"""What doctor shows people: the verdict, what it rests on, and the commands that change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashvar.binaries.manifest import KernelRow, Rule
from flashvar.cli.diagnosis import Report, rules_of
from flashvar.cli.page import BAD, GOOD, PLAIN, QUIET, Page, Row, Section, Table, rows
from flashvar.cli.speed import DTYPE, OURS, PEERS, SEQLEN, TOKENS, WIDTH, Speed
from flashvar.machine.system import System
from flashvar.selection.compatibility import dim_words, dotted
from flashvar.selection.request import Decision, Verdict

# Below this part of the record something is wrong with the card, not with the measurement.
_SLOW = 0.85


def page(report: Report) -> Page:
    """The whole report, one section per question."""
    return Page(
        verdict=report.conclusion,
        tone=GOOD if report.healthy else BAD,
        sections=(
            Section("System", (_system(report),)),
            Section("Devices", _devices(report.system)),
            Section("Binaries", _binaries(report), notes=_no_binary(report)),
            Section("What runs", tuple(_answers(report.decisions))),
            *_families(report.decisions),
            *([] if report.speed is None else [_speed(report.speed)]),
        ),
        remedy="To run something better",
        commands=report.fixes,
    )


def _system(report: Report) -> Table:
    system, overrides = report.system, report.overrides
    driver = None
    if system.driver_cuda is not None:
        driver = f"{system.driver_display or '?'}, serves CUDA {dotted(system.driver_cuda)}"
    made_for = (
        f"ROCm {system.torch_hip}" if system.torch_hip else f"CUDA {system.torch_cuda or 'none'}"
    )
    shortened = system.visible_devices is not None
    facts = [
        ("python", f"{system.python} on {system.platform}"),
        ("torch", f"{system.torch}, made for {made_for}" if system.torch else None),
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
        *([("forced to", overrides.architecture)] if overrides.architecture else []),
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
            binary.architecture.name,
            binary.manifest.version,
            binary.candidate.origin,
            _holdings(binary.manifest.kernels) + (f"; {binary.skew}" if binary.skew else ""),
        )
        for binary in report.inventory.binaries
    ]
    bad = [
        (
            refusal.architecture or "?",
            "",
            refusal.candidate.origin,
            f"refused: {refusal.reason}" + (f" -> {refusal.fix}" if refusal.fix else ""),
        )
        for refusal in report.inventory.refusals
    ]
    heading = ("architecture", "version", "from", "state")
    found = (*rows(good), *rows(bad, BAD))
    return (Table(found, heading),) if found else ()


def _no_binary(report: Report) -> tuple[str, ...]:
    """Why there may be none although one was asked for."""
    found, offers = report.inventory, report.inventory.offers
    extras = sorted(offers.here | offers.elsewhere)
    if not extras or found.binaries or found.refusals:
        return ()
    return (
        f"An installer passes over an extra it does not know: flashvar has {', '.join(extras)}.",
    )


def _holdings(held: tuple[KernelRow, ...]) -> str:
    """What a binary holds, per op: its dtypes and head dims."""
    ops_of: dict[str, list[str]] = {}
    for op in dict.fromkeys(row.op for row in held):
        mine = [row for row in held if row.op == op]
        dtypes = ", ".join(sorted({row.dtype for row in mine if row.dtype is not None}))
        dims = ", ".join(dim_words(row.dims for row in mine))
        many = "s" if "," in dims else ""
        ops_of.setdefault(dtypes + (f", head dim{many} {dims}" if dims else ""), []).append(op)
    return "; ".join(f"{', '.join(ops)} {what}" for what, ops in ops_of.items())


def _answers(decisions: Sequence[Decision]) -> Iterator[Table]:
    """One table per group of requests whose verdicts read the same, ops asked alike together."""
    groups: dict[tuple[int | None, str, str], list[Decision]] = {}
    for decision in decisions:
        key = (decision.request.device, decision.request.op, decision.explain())
        groups.setdefault(key, []).append(decision)
    alike: dict[tuple[int | None, str, str], list[Decision]] = {}
    for (device, _, trace), members in groups.items():
        dtypes = ", ".join(dict.fromkeys(one.request.dtype for one in members))
        dims = ", ".join(dim_words(one.request.dims for one in members))
        what = dtypes + (f", head dim {dims}" if dims else "")
        alike.setdefault((device, what, trace), []).append(members[0])
    for (device, what, _), firsts in alike.items():
        where = "CPU" if device is None else f"cuda:{device}"
        ops = ", ".join(one.request.op for one in firsts)
        chosen = firsts[0].chosen.candidate if firsts[0].chosen else "nothing"
        yield Table(_trace(firsts[0]), caption=f"{where}  {ops} {what}: {chosen}")


def _families(decisions: Sequence[Decision]) -> Iterator[Section]:
    """Which kernels inside a binary calls take; nothing where every binary has one family."""
    dims_of: dict[tuple[str, str, str, tuple[Rule, ...]], set[tuple[int, int]]] = {}
    for one in decisions:
        if one.chosen is not None and (rules := rules_of(one)):
            key = (one.chosen.candidate, one.request.op, one.request.dtype, rules)
            dims_of.setdefault(key, set()).add(one.request.dims)
    if all(len(rules) == 1 for *_, rules in dims_of):
        return
    dtypes_of: dict[tuple[str, str, str, tuple[Rule, ...]], list[str]] = {}
    for (candidate, op, dtype, rules), dims in dims_of.items():
        words = ", ".join(dim_words(dims))
        dtypes_of.setdefault((candidate, op, words, rules), []).append(dtype)
    tables = []
    for (candidate, op, words, rules), dtypes in dtypes_of.items():
        caption = f"{candidate}  {op} {', '.join(dtypes)}, head dim {words}"
        lines = rows([(rule.family, rule.when) for rule in rules])
        tables.append(Table(lines, caption=caption))
    yield Section("Inside the binary", tuple(tables))


def _trace(decision: Decision) -> tuple[Row, ...]:
    return tuple(_verdict(verdict, decision) for verdict in decision.verdicts)


def _verdict(verdict: Verdict, decision: Decision) -> Row:
    if not verdict.accepted:
        fix = f" -> {verdict.fix}" if verdict.fix else ""
        return Row((verdict.candidate, "no", verdict.reason + fix), PLAIN if fix else QUIET)
    if verdict is decision.chosen and decision.error is not None:
        return Row((verdict.candidate, "raises", decision.error), BAD)
    if verdict is decision.chosen:
        tone = PLAIN if verdict.backend == "reference" else GOOD
        return Row((verdict.candidate, "chosen", verdict.reason), tone)
    return Row((verdict.candidate, "stands by", verdict.reason), QUIET)


def _speed(speed: Speed) -> Section:
    """Rates in TFLOP/s beside those of torch, and of the record."""
    title = "Speed of causal attention, TFLOP/s"
    if speed.why is not None:
        return Section(title, otherwise=f"not measured: {speed.why}")
    found = []
    for one in speed.results:
        ratio = speed.ratio(one)
        recorded = speed.recorded(one).get(OURS)
        compared = "-" if recorded is None else f"{recorded:.0f}"
        if ratio is not None:
            compared += f" ({ratio:.0%})"
        rates = [_rate(one.tflops.get(name)) for name in (OURS, *PEERS)]
        cell = one.cell.direction, str(one.cell.head_dim)
        found.append((*cell, rates[0], compared, *rates[1:], one.candidate))
    heading = ("", "head dim", OURS, "recorded", *PEERS.values(), "served by")
    table = Table(rows(found), heading, numbers=frozenset({1, 2, 3, 4, 5}))
    return Section(title, (table,), notes=(*_record(speed), *_failures(speed)))


def _rate(tflops: float | None) -> str:
    return "-" if tflops is None else f"{tflops:.0f}"


def _record(speed: Speed) -> Iterator[str]:
    yield f"{TOKENS} tokens in sequences of {SEQLEN}, {DTYPE}, {WIDTH} wide."
    if speed.record is None:
        yield f"Nothing is recorded for {speed.gpu}."
        return
    record = speed.record
    yield (
        f"Recorded on {record.gpu} on {record.time[:10]}, "
        f"torch {record.torch}, driver {record.driver}."
    )
    ratios = [ratio for one in speed.results if (ratio := speed.ratio(one)) is not None]
    if ratios and min(ratios) < _SLOW:
        yield (
            "Slower than recorded: look for other work on this GPU, for its clocks and power "
            "limit (nvidia-smi -q -d CLOCK,POWER), and whether it is what serves above."
        )


def _failures(speed: Speed) -> Iterator[str]:
    """Each reason once, whatever cells it kept from being timed."""
    reasons = (
        f"{PEERS.get(name, name)}: {why}"
        for one in speed.results
        for name, why in one.failures.items()
    )
    yield from dict.fromkeys(reasons)
