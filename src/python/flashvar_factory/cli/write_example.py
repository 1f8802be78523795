"""Write a small project that builds as it is: one op, its C interface, tests, a workflow."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from flashvar_factory.build import example


def configure(parser: argparse.ArgumentParser) -> None:
    """The name, and the folder."""
    parser.add_argument("project", help="lower-case letters and digits: mykernels")
    parser.add_argument("--output", type=Path, help="a new or an empty folder (default: the name)")


def run(arguments: argparse.Namespace) -> None:
    """Write it, and say how to build it."""
    folder = Path(os.path.realpath(arguments.root / (arguments.output or arguments.project)))
    for path in example.write(arguments.project, folder):
        print(path)
    print(f"cd {shlex.quote(str(folder))} && nox -s wheels && nox -s tests")
