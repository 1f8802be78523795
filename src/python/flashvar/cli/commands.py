"""The commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from flashvar import ops
from flashvar._version import __version__
from flashvar.cli.parser import Command, Parser

if TYPE_CHECKING:
    from flashvar.cli.tune import OpTune
    from flashvar.cli.warmup import OpWarmup

_EPILOG: Final = """\
start here:
  flashvar install           install the binaries for the GPUs of this machine
  flashvar doctor            what runs here, why, and how to improve it
  flashvar doctor --verify   check every op on the GPU: about a minute
  flashvar doctor --bench    time the ops on the GPU: about ten seconds
  flashvar warmup            compile Triton kernels before the first request

`python -m flashvar` is the same command.
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The chosen command with its options; exits with 2 if it is missing or wrong."""
    parser, commands = _parser(arguments)
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.exit(2, parser.format_help())
    if chosen.command == "doctor":
        _check_doctor(chosen, commands["doctor"])
    return chosen


def _check_doctor(chosen: argparse.Namespace, parser: Parser) -> None:
    """Refuse options of doctor that do not go together."""
    if chosen.device is not None and not (chosen.bench or chosen.verify):
        parser.error("--device goes with --bench or --verify: add one, or leave --device out")
    if chosen.verify and (chosen.bench or chosen.json):
        parser.error("--verify prints one line: leave --bench and --json out")


def _parser(arguments: list[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of commands: only the command that is named gets its options.

    Those of `warmup` come from modules of the ops, whose import takes as long as all else.
    """
    named = next((word for word in arguments if word in _COMMANDS), None)
    parser = Parser(
        prog="flashvar",
        description="Show, install and prepare the kernels of flashvar on this machine.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"flashvar {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="command", parser_class=Command
    )
    made: dict[str, Parser] = {}
    for name, (summary, closing, add_options) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{_sentence(summary)}", epilog=closing
        )
        if name == named:
            add_options(command, _op_of(arguments))
        made[name] = command
    return parser, made


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def _doctor(parser: Parser, _op: str) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of --json")
    parser.add_argument(
        "--bench",
        action="store_true",
        help="also time the ops and torch's kernels, about ten seconds, and show recorded rates",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every op on the GPU, about a minute, and print one line for an issue",
    )
    parser.add_argument(
        "--device", type=int, metavar="N", help="CUDA device for --bench or --verify (default: 0)"
    )


def _install(parser: Parser, _op: str) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        metavar="SOURCE",
        help="a folder of wheels, or the URL of a package index (default: FLASHVAR_INDEX)",
    )
    parser.add_argument(
        "--arch",
        metavar="sm_XY,...",
        help="install for these GPUs, or `all`, instead of the GPUs of this machine; with -cu12 "
        "after a name for drivers older than 580",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="download and check everything, install nothing"
    )


def _show(parser: Parser, _op: str) -> None:
    parser.add_argument("architecture", nargs="*", help="sm_XY (default: all installed)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _warmup(parser: Parser, op: str) -> None:
    from flashvar.cli.warmup import warmed_ops

    _options_of_op(parser, op, warmed_ops())
    where = parser.add_argument_group("where")
    where.add_argument(
        "--arch",
        metavar="sm_XY",
        help="compile for a GPU that is not in this machine, into Triton's cache",
    )
    where.add_argument(
        "--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)"
    )
    where.add_argument("--all", action="store_true", help="include calls that compiled kernels run")
    where.add_argument("--json", action="store_true", help="print JSON")


def _tune(parser: Parser, op: str) -> None:
    from flashvar.cli.tune import tuned_ops

    _options_of_op(parser, op, tuned_ops())
    parser.add_argument(
        "--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _options_of_op(parser: Parser, op: str, modules: Mapping[str, OpWarmup | OpTune]) -> None:
    """Add the positional argument `op`, and the options of that op."""
    names = tuple(modules)
    chosen = op if op in names else names[0]
    if names[1:]:
        known = f"one of {', '.join(sorted(names))} (default: {names[0]})"
        known += f"; `{parser.prog} OP --help` lists the options of another"
    else:
        known = f"{names[0]}, the only one"
    parser.add_argument(
        "op",
        nargs="?",
        default=chosen,
        choices=names,
        metavar="op",
        help=known,
    )
    modules[chosen].add_options(parser)
    if chosen != names[0]:
        parser.help_of = f"{parser.prog} {chosen}"
    parser.elsewhere = partial(_of_other_ops, parser, modules)


def _of_other_ops(parser: Parser, modules: Mapping[str, OpWarmup | OpTune]) -> dict[str, str]:
    """The options that a parser lacks, each with the ops that have it."""
    found: dict[str, list[str]] = {}
    for name, module in modules.items():
        other = Parser(add_help=False)
        module.add_options(other)
        for option in other.option_names():
            if option not in parser.option_names():
                found.setdefault(option, []).append(name)
    return {option: ", ".join(ops) for option, ops in found.items()}


def _op_of(arguments: list[str]) -> str:
    """The op that follows the command on a command line; the first op by default."""
    names = tuple(ops.TABLE)
    return next((argument for argument in arguments[1:] if argument in names), names[0])


_COMMANDS: Final[dict[str, tuple[str, str, Callable[[Parser, str], None]]]] = {
    "doctor": (
        "show what runs on this machine, and why nothing better does",
        "Exit code 0 if there is a GPU, on every GPU something faster than the reference\n"
        "runs every op, and no installed release wheel lacks a kernel; else 1. With\n"
        "--bench also 1 if nothing could be timed. With --verify 0 if every checked call\n"
        "is right; 1 if one is wrong or raises, or there is no GPU.",
        _doctor,
    ),
    "install": (
        "check and install the binaries for the GPUs of this machine",
        "Exit code 0 when they are installed; `flashvar doctor` then shows what runs.\n"
        "12: the environment is not usable, or pip or uv failed while installing; then it\n"
        "may be incomplete. After every other code nothing was changed: 2 an option is\n"
        "not valid, 13 no GPU or no binary for it, 14 the driver is too old, 15 no source\n"
        "has the wheel, 16 a hash differs. 130 or 143: it was interrupted.",
        _install,
    ),
    "show": (
        "list the installed binaries and their kernels",
        "Exit code 0 when a binary was found, else 1.",
        _show,
    ),
    "warmup": (
        "compile a model's Triton kernels before its first request",
        "Compiles the kernels of calls that Triton runs here. Exit code 0 when all are\n"
        "ready, 1 when some cannot be compiled.",
        _warmup,
    ),
    "tune": (
        "measure tile sizes of the Triton kernels on this GPU, and store the best",
        "Exit code 0 when the tiles were stored, 1 when they could not be written.",
        _tune,
    ),
}
