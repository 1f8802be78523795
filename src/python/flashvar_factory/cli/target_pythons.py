"""The option --python of commands that install wheels: into which Pythons."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flashvar_factory.release import pythons
from flashvar_factory.release.pythons import Python


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Give a command the option."""
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        help="install into this one, instead of each Python 3.10 or newer found; may be repeated",
    )


def read(arguments: argparse.Namespace) -> tuple[Python, ...]:
    """Those that were named, or one of each version on this machine.

    ConfigurationError for a named one that will not do.
    """
    if arguments.python:
        return pythons.named(arguments.python)
    return pythons.find(os.environ)
