"""The diagnosis for people: plain aligned text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashvar._version import __version__
from flashvar.cli.diagnosis import Report
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
    words = []
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        dtypes = ", ".join(sorted({row.dtype for row in mine if row.dtype is not None}))
        dims = _numbers({row.head_dim for row in mine if row.head_dim is not None})
        words.append(f"{op} {dtypes}" + (f", head dims {dims}" if dims else ""))
    return "; ".join(words)


def _answers(decisions: Sequence[Decision]) -> Iterator[str]:
    """One block per group of requests whose verdicts read the same."""
    groups: dict[tuple[int | None, str, str], list[Decision]] = {}
    for decision in decisions:
        key = (decision.request.device, decision.request.op, decision.explain())
        groups.setdefault(key, []).append(decision)
    for (device, op, trace), members in groups.items():
        dtypes = ", ".join(dict.fromkeys(one.request.dtype for one in members))
        dims = _numbers({one.request.head_dim for one in members if one.request.head_dim})
        where = "CPU" if device is None else f"cuda:{device}"
        chosen = members[0].chosen
        what = f"{op} {dtypes}" + (f", head dim {dims}" if dims else "")
        yield f"  {where}  {what}: {chosen.candidate if chosen else 'nothing'}"
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


def _numbers(values: set[int]) -> str:
    return ", ".join(map(str, sorted(values)))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
