"""The command line: `python -m flashvar_factory list|build|wheels|...`, one module per command.

A command's module has a docstring (its help), `configure(parser)` and `run(arguments)`; it is
imported when it is called. Errors are printed as one message; the exit code is the error's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from flashvar.errors import FlashvarError

COMMANDS: Final = {
    "list": "list_builds",
    "configure": "configure_plans",
    "build": "build_dev",
    "develop": "develop_here",
    "wheels": "make_wheels",
    "index": "make_index",
    "manifest": "write_manifest",
    "toolkit": "show_toolkit",
    "devices": "show_devices",
}
INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", type=Path, default=Path.cwd(), help="where variants.toml is")
    parser = argparse.ArgumentParser(
        prog="flashvar_factory", description=_summary(__doc__), parents=[common]
    )
    commands = parser.add_subparsers(required=True, dest="name", metavar="command")
    # Help and mistakes list all commands; a call needs its own alone.
    _, after_root = common.parse_known_args(words)
    named = [name for name in after_root[:1] if name in COMMANDS]
    for name in named or COMMANDS:
        module = _module(name)
        summary = _summary(module.__doc__)
        module.configure(commands.add_parser(name, help=summary, description=summary))
    parsed = parser.parse_args(words)
    parsed.root = parsed.root.resolve()
    try:
        _module(parsed.name).run(parsed)
    except FlashvarError as error:
        print(f"{parsed.name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{parsed.name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _module(name: str) -> ModuleType:
    return import_module(f"flashvar_factory.cli.{COMMANDS[name]}")


def _summary(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0]
