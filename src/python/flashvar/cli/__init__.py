"""The command `flashvar`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from flashvar.cli import commands
from flashvar.errors import FlashvarError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    chosen = commands.parse(list(sys.argv[1:] if arguments is None else arguments))
    try:
        return _RUN[chosen.command](chosen)
    except FlashvarError as error:
        print(f"flashvar: {error}", file=sys.stderr)
        return error.exit_code


def _doctor(chosen: argparse.Namespace) -> int:
    from flashvar.cli import diagnosis, doctor_page, screen

    report = diagnosis.examine_this_machine()
    if chosen.json:
        print(report.to_json(), end="")
    else:
        screen.show(doctor_page.page(report))
    return 0 if report.healthy else 1


def _tune(chosen: argparse.Namespace) -> int:
    from flashvar.cli import tune

    return tune.run(chosen.head_dim, chosen.direction, chosen.device, as_json=chosen.json)


_RUN: Final[dict[str, Callable[[argparse.Namespace], int]]] = {"doctor": _doctor, "tune": _tune}
