"""The diagnosis for people: plain aligned text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashvar._version import __version__
from flashvar.cli.diagnosis import Report
from flashvar.fitness import dim_words
from flashvar.manifest import KernelRow
from flashvar.selection import Decision
from flashvar.system import System


def render(report: Report) -> str:
    """The whole report, one section per question."""
    return "\n".join((f"flashvar {__version__}", *_sections(report))) + "\n"


def _sections(report: Report) -> Iterator[str]:
    yield _section("System", _system(report))
    yield _section("Devices", _devices(report.system))
    yield _section("Binaries", _binaries(report))
    yield _section("What runs", list(_answers(report.decisions)))
    if report.fixes:
        yield _section("To run something better", [f"  {fix}" for fix in report.fixes])
    yield f"\n{report.conclusion}"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join((f"\n{title}", *(lines or ["  none"])))


def _system(report: Report) -> list[str]:
    system, overrides = report.system, report.overrides
    driver = None
    if system.driver_cuda is not None:
        driver = f"{system.driver_display or '?'}, serves CUDA {_dotted(system.driver_cuda)}"
    made_for = (
        f"ROCm {system.torch_hip}" if system.torch_hip else f"CUDA {system.torch_cuda or 'none'}"
    )
    rows = [
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
        *([("backend", overrides.backend)] if overrides.backend != "auto" else []),
        *([("forced to", overrides.architecture)] if overrides.architecture else []),
    ]
    return align([*((key, value or "not found") for key, value in rows), *named])


def _devices(system: System) -> list[str]:
    rows = [
        (
            f"cuda:{device.index}",
            device.name + (" (Tegra)" if device.tegra else ""),
            _dotted(device.capability),
            f"{device.shared_memory / 1024:.0f} KiB",
            str(device.multiprocessors),
            f"{device.memory / 2**30:.1f} GiB",
        )
        for device in system.devices
    ]
    heading = ("device", "name", "capability", "shared memory per block", "SMs", "memory")
    return align([heading, *rows]) if rows else []


def _binaries(report: Report) -> list[str]:
    heading = ("architecture", "version", "from", "state")
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
    return align([heading, *good, *bad]) if good or bad else []


def _holdings(rows: tuple[KernelRow, ...]) -> str:
    """What a binary holds, per op: its dtypes and head dims."""
    ops_of: dict[str, list[str]] = {}
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        dtypes = ", ".join(sorted({row.dtype for row in mine if row.dtype is not None}))
        dims = ", ".join(dim_words(row.dims for row in mine))
        ops_of.setdefault(dtypes + (f", head dims {dims}" if dims else ""), []).append(op)
    return "; ".join(f"{', '.join(ops)} {what}" for what, ops in ops_of.items())


def _answers(decisions: Sequence[Decision]) -> Iterator[str]:
    """One block per group of requests whose verdicts read the same, ops asked alike together."""
    groups: dict[tuple[int | None, str, str], list[Decision]] = {}
    for decision in decisions:
        key = (decision.request.device, decision.request.op, decision.explain())
        groups.setdefault(key, []).append(decision)
    ops_of: dict[tuple[int | None, str, str, str], list[str]] = {}
    for (device, op, trace), members in groups.items():
        dtypes = ", ".join(dict.fromkeys(one.request.dtype for one in members))
        dims = ", ".join(dim_words(one.request.dims for one in members))
        chosen = members[0].chosen.candidate if members[0].chosen else "nothing"
        what = dtypes + (f", head dim {dims}" if dims else "")
        ops_of.setdefault((device, what, chosen, trace), []).append(op)
    for (device, what, chosen, trace), ops in ops_of.items():
        where = "CPU" if device is None else f"cuda:{device}"
        yield f"  {where}  {', '.join(ops)} {what}: {chosen}"
        for line in trace.splitlines():
            yield f"      {line}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
