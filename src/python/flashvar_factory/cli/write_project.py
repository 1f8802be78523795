"""Write a self-contained source project of one wheel."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from flashvar.errors import ConfigurationError
from flashvar_factory.build import self_contained
from flashvar_factory.cli import selected
from flashvar_factory.config.suggestions import listed


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments, and the folder."""
    selected.add_arguments(parser, "none; name one wheel")
    parser.add_argument("--output", type=Path, required=True, help="a new or empty folder")


def run(arguments: argparse.Namespace) -> None:
    """Write it, and say how to build it."""
    selection = selected.read(arguments)
    builds = selection.for_release()
    if len(builds) != 1:
        names = listed(build.kind.name for build in builds)
        raise ConfigurationError(f"expected one architecture for a project, found {names}")
    output = (arguments.root / arguments.output).resolve()
    self_contained.write(selection.config, builds[0], root=arguments.root, output=output)
    folder = shlex.quote(str(output))
    print(f"pip wheel {folder}")
    print(f"cibuildwheel --platform linux {folder}")
