"""Make a static package index of the wheels in a folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flashvar_factory import index
from flashvar_factory.index import yanks


def configure(parser: argparse.ArgumentParser) -> None:
    """Where the wheels are, and where the pages go."""
    parser.add_argument(
        "--wheels", type=Path, default=Path("dist"), help="folder of wheels (default: dist)"
    )
    parser.add_argument(
        "--extra-wheels",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="another folder to list: an earlier release, wheel variants",
    )
    parser.add_argument(
        "--yanked",
        type=Path,
        metavar="FILE",
        help=f"releases that were withdrawn (default: {yanks.FILE_NAME}, where there is one)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/index"),
        help="folder of the index (default: build/index)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the pages, and say how to install from them."""
    root: Path = arguments.root
    usual = root / yanks.FILE_NAME
    named = root / arguments.yanked if arguments.yanked else None
    site = root / arguments.output
    names = index.write(
        root / arguments.wheels,
        site,
        extra=[root / folder for folder in arguments.extra_wheels],
        yanked=named or (usual if os.path.lexists(usual) else None),
    )
    for name in names:
        print(f"  {name}")
    # Beside another index the highest version wins, whoever put it there.
    print(
        "Install dependencies first, from your usual index; then the wheels, from this one alone:"
    )
    print(f"pip install --index-url {site.as_uri()}/ ...")
