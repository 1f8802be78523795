"""The command `flashvar`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from flashvar._version import __version__
from flashvar.errors import FlashvarError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="flashvar", description="Attention kernels, inspected.")
    parser.add_argument("--version", action="version", version=f"flashvar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="show what would run on this machine, and why nothing better would",
        description="Exit code 0 when something other than the CPU reference would run, else 1.",
    )
    doctor.add_argument("--json", action="store_true", help="for machines")
    tune = commands.add_parser(
        "tune",
        help="measure tiles of the Triton kernels on this GPU, and keep the best",
        description="Exit code 0 when the tiles were kept, 1 when they could not be written.",
    )
    tune.add_argument(
        "--head-dim", type=int, nargs="+", default=[64, 128], metavar="N", help="8 to 256, by 8"
    )
    tune.add_argument(
        "--direction", nargs="+", choices=("forward", "backward"), default=["forward", "backward"]
    )
    tune.add_argument("--device", type=int, default=0, help="as torch numbers them")
    tune.add_argument("--json", action="store_true", help="for machines")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "tune":
            return _tune(chosen)
        return _doctor(as_json=chosen.json)
    except FlashvarError as error:
        print(f"flashvar: {error}", file=sys.stderr)
        return error.exit_code


def _doctor(*, as_json: bool) -> int:
    from flashvar.cli import diagnosis, doctor_text

    report = diagnosis.examine_this_machine()
    print(report.to_json() if as_json else doctor_text.render(report), end="")
    return 0 if report.healthy else 1


def _tune(chosen: argparse.Namespace) -> int:
    from flashvar.cli import tune

    return tune.run(chosen.head_dim, chosen.direction, chosen.device, as_json=chosen.json)
