"""Open the library of an installed binary distribution, as its manifest describes it."""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path

from flashvar.errors import BinaryError
from flashvar_factory.build import development


def configure(parser: argparse.ArgumentParser) -> None:
    """Which distribution."""
    parser.add_argument("distribution", help="name of an installed distribution, e.g. vecadd-sm90")


def run(arguments: argparse.Namespace) -> None:
    """Print a line about each of its libraries; BinaryError when it has none, or one is refused."""
    try:
        found = metadata.distribution(arguments.distribution)
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: of no name at all
        raise BinaryError(
            f"expected the distribution {arguments.distribution!r} in this environment, found "
            "none; pip install it"
        ) from None
    packages = [entry.value for entry in found.entry_points if entry.group.endswith(".binaries")]
    if not packages:
        raise BinaryError(
            f"{arguments.distribution}: expected an entry point *.binaries, found none"
        )
    for package in packages:
        print(development.check_loads(Path(str(found.locate_file(package)))))
