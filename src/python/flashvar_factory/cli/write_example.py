"""Write a small project that builds as it is: one op, its C interface, tests, a workflow."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from flashvar.binaries import install_commands
from flashvar_factory.build import example


def configure(parser: argparse.ArgumentParser) -> None:
    """The name, the folder, and the factory that builds the project."""
    parser.add_argument("project", help="lower-case letters and digits: mykernels")
    parser.add_argument("--output", type=Path, help="a new or an empty folder (default: the name)")
    parser.add_argument(
        "--factory",
        type=Path,
        metavar="WHEEL",
        help="the wheel of flashvar-factory, copied into the project (default: it comes from PyPI)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write it, and say how to build it."""
    factory = None if arguments.factory is None else arguments.root / arguments.factory
    folder = Path(os.path.realpath(arguments.root / (arguments.output or arguments.project)))
    for path in example.write(arguments.project, folder, factory):
        print(path)
    if factory is None and not install_commands.PUBLISHED:
        print(
            "flashvar-factory is not on PyPI yet: put its wheel into vendor/ (`--factory` does), "
            "or into a folder that PIP_FIND_LINKS and UV_FIND_LINKS name"
        )
    print(f"cd {shlex.quote(str(folder))} && nox -s wheels && nox -s tests")
