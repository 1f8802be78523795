"""Build, check and publish wheels of compiled kernels, one per GPU architecture.

There is one module per command. It has a docstring (its help), `configure(parser)` and
`run(arguments)`, and is imported when it is called. Errors are printed as one message; the exit
code is the error's.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from flashvar.cli import output
from flashvar.cli.parser import Command, Parser
from flashvar.errors import FlashvarError
from flashvar_factory.errors import BuildError
from flashvar_factory.inspect.plain_text import plain

COMMANDS: Final = {
    "init": "write_example",
    "list": "list_builds",
    "configure": "configure_plans",
    "build": "build_dev",
    "develop": "develop_here",
    "wheels": "make_wheels",
    "audit": "audit_wheels",
    "verify": "verify_downloads",
    "index": "make_index",
    "serve": "serve_index",
    "smoke": "smoke_wheels",
    "sbom": "show_sbom",
    "write-sbom": "write_sbom",
    "variants": "make_variants",
    "hf-kernel": "write_hf_kernel",
    "reproduce": "reproduce_wheels",
    "merge-shards": "merge_shards",
    "release": "make_release",
    "check-release": "check_release",
    "select-unpublished": "copy_unpublished",
    "cibuildwheel": "build_in_container",
    "project": "write_project",
    "plan": "write_plan",
    "load-test": "load_installed",
    "manifest": "write_manifest",
    "toolkit": "show_toolkit",
    "devices": "show_devices",
    "check-selection": "check_selection",
}
INTERRUPTED: Final = 130
# Of a disk, of a user's quota, of a process's limit. Writing to an open file says no name.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_EPILOG: Final = """\
start here:
  {program} init NAME            write a project with one op
  {program} list                 list what its variants.toml builds
  {program} wheels sm90          build the wheel of one architecture into dist/
  {program} audit dist/*.whl     check that wheels are what they claim to be
  {program} index                make a package index of dist/ in build/index/

`{program} COMMAND --help` lists the options of a command.
"""


def main(arguments: Sequence[str] | None = None, *, program: str = "flashvar_factory") -> int:
    """Run one command; the exit code. `program` is the name that was typed."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    return output.delivered(program, lambda: _call(command_line, program))


def _call(command_line: list[str], program: str) -> int:
    """Parse the command line and run their command; an error is one message."""
    common: Any = Parser(prog=program, add_help=False)
    common.add_argument(
        "--root",
        type=Path,
        default=argparse.SUPPRESS,
        help="where variants.toml is; may also come after the command (default: here)",
    )
    parser = Parser(
        prog=program,
        description=_summary(__doc__),
        epilog=_EPILOG.format(program=program),
        parents=[common],
    )
    commands = parser.add_subparsers(
        title="commands", required=True, dest="name", metavar="command", parser_class=Command
    )
    # Help and mistakes list all commands; a call needs its own alone.
    _, after_root = common.parse_known_args(command_line)
    named = [name for name in after_root[:1] if name in COMMANDS]
    for name in named or COMMANDS:
        module = _module(name)
        summary = _summary(module.__doc__)
        command = commands.add_parser(name, help=summary, description=summary, parents=[common])
        module.configure(command)
    parsed = parser.parse_args(command_line, argparse.Namespace(root=Path()))
    try:
        parsed.root = _real(parsed.root)
        _run(parsed)
    except FlashvarError as error:
        lines = (plain(line) for line in str(error).split("\n"))
        output.complain(f"{program} {parsed.name}: " + "\n".join(lines))
        return error.exit_code
    except KeyboardInterrupt:
        output.complain(f"{program} {parsed.name}: interrupted")
        return INTERRUPTED
    return 0


def _real(root: Path) -> Path:
    """The folder itself, also of a loop of links; BuildError where this one was removed."""
    try:
        return Path(os.path.realpath(root))
    except FileNotFoundError as error:
        raise BuildError(
            f"expected to work in a folder that exists, found: {error.strerror}; change to another"
        ) from error


def _run(parsed: argparse.Namespace) -> None:
    """Run the command; what a file refuses is an error of the build."""
    try:
        _module(parsed.name).run(parsed)
    except shutil.Error as error:  # of several files that were copied
        source, target, why = error.args[0][0]
        full = next((text for text in map(os.strerror, _NO_ROOM) if text in why), None)
        if full is not None:
            raise _no_room(target, full) from error
        raise BuildError(
            f"{source}: expected a file that can be copied, found: {why}; remove it, or change "
            "its permissions"
        ) from error
    except OSError as error:
        if error.errno in _NO_ROOM and not output.is_full(sys.stdout):
            where = error.filename2 or error.filename or "what the command writes"
            raise _no_room(where, error.strerror) from error
        if error.filename is None:  # no file, but a stream
            raise
        raise BuildError(
            f"{error.filename}: expected to read or write here, found: {error.strerror}; "
            "name another path, or change what is there or its permissions"
        ) from error


def _no_room(where: str, found: str | None) -> BuildError:
    return BuildError(
        f"expected room for {where}, found: {found}; free space, or name a folder on another disk "
        "(TMPDIR names that of temporary files)"
    )


def _module(name: str) -> ModuleType:
    return import_module(f"flashvar_factory.cli.{COMMANDS[name]}")


def _summary(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0]
