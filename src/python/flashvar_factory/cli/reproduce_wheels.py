"""Build wheels twice, in two folders, and compare their bytes."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.cli import selected
from flashvar_factory.release import reproduce


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments, and where the two builds work."""
    selected.add_arguments(parser)
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path("build/reproduce"),
        help="where it works (default: build/reproduce)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the files that are the same; ReproducibilityError names the first difference."""
    selection = selected.read(arguments)
    one, two = reproduce.build_twice(
        arguments.selection,
        selection.compiler(),
        root=arguments.root,
        folder=(arguments.root / arguments.work_dir).resolve(),
    )
    reproduce.require(one.iterdir(), two.iterdir(), f"the files are in {one} and {two}")
    for file in sorted(one.iterdir()):
        print(f"the same {file.stat().st_size:,} bytes twice: {file.name}")
