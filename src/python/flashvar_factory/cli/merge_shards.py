"""Check the files of all shards, and put them into one folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.cli import selected
from flashvar_factory.release import members
from flashvar_factory.release.merge import merge


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments that the shards were built with, their folders, and where the files go."""
    selected.add_arguments(parser)
    parser.add_argument(
        "--shard",
        type=Path,
        action="append",
        required=True,
        help="a folder with the files of one shard; repeat it for each",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("dist"), help="folder of the files (default: dist)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the files; ReleaseError with everything that is wrong."""
    selection = selected.read(arguments)
    root = arguments.root
    expected = members.expected(selection.config, selection.whole_release(), root)
    shards = [root / shard for shard in arguments.shard]
    for file in merge(shards, root / arguments.output, selection.config, expected):
        print(f"{file.stat().st_size:>12,} {file}")
