"""The command `flashvar`."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from flashvar import variables
from flashvar.cli import commands, output
from flashvar.errors import BackendUnavailableError, FlashvarError

if TYPE_CHECKING:
    from flashvar.cli.diagnosis import Report
    from flashvar.cli.speed import Speed

_INTERRUPTED: Final = 128  # plus the number of the signal, the shell's convention


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return output.delivered("flashvar", lambda: _run(given))


def _run(given: list[str]) -> int:
    """Run one command; an error prints one message."""
    chosen = commands.parse(given)
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths may hold characters it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    # Of torch without NumPy, which no command needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    variables.warn_of_misspelled()
    try:
        return _RUN[chosen.command](chosen)
    except FlashvarError as error:
        output.complain(f"flashvar: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        output.complain("flashvar: interrupted")
        return _INTERRUPTED + next(iter(interrupt.args), signal.SIGINT)


def _doctor(chosen: argparse.Namespace) -> int:
    from flashvar.cli import diagnosis, doctor_page, screen

    if chosen.schema:
        print(diagnosis.SCHEMA_FILE.read_text(encoding="utf-8"), end="")
        return 0
    report = diagnosis.examine_this_machine()
    if chosen.verify:
        return _verify(report, chosen.device or 0)
    if chosen.bench:
        report = replace(report, speed=_speed(report, chosen))
    if chosen.json:
        print(report.to_json(), end="")
    else:
        screen.show(doctor_page.page(report))
    measured = report.speed is None or report.speed.why is None
    return 0 if report.healthy and measured else 1


def _verify(report: Report, number: int) -> int:
    from flashvar.cli import verify

    if report.system.torch is None:
        why = report.system.problem or "torch is not installed"
        raise BackendUnavailableError(f"doctor --verify calls the ops: {why}")
    from flashvar.cli import verification

    found = verification.check(report, number)
    print(verify.line(found, report.system, report.inventory))
    return 0 if found.passed else 1


def _speed(report: Report, chosen: argparse.Namespace) -> Speed:
    number = chosen.device or 0
    if report.system.torch is None:
        from flashvar.cli.speed import Speed

        return Speed(number, None, why=report.system.problem or "torch is not installed")
    from flashvar.cli import bench

    return bench.check(report, number, quiet=chosen.json)


def _show(chosen: argparse.Namespace) -> int:
    from flashvar.cli import show

    return show.run(chosen.architecture, as_json=chosen.json)


def _warmup(chosen: argparse.Namespace) -> int:
    from flashvar.cli import warmup

    options = warmup.WarmupOptions(
        kinds=tuple(warmup.warmed_ops()[chosen.op].kinds(chosen)),
        op=chosen.op,
        architecture=chosen.arch,
        device=chosen.device,
        everything=chosen.all,
    )
    return warmup.run(options, as_json=chosen.json)


def _install(chosen: argparse.Namespace) -> int:
    from flashvar.cli import install

    return install.run(chosen)


def _tune(chosen: argparse.Namespace) -> int:
    from flashvar.cli import tune

    return tune.run(chosen)


_RUN: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "doctor": _doctor,
    "install": _install,
    "show": _show,
    "tune": _tune,
    "warmup": _warmup,
}
