"""Copy the checked files that an index does not have yet; refuse other bytes under their names."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.errors import PackagingError
from flashvar_factory.index.entries import project_of
from flashvar_factory.release import checks, publish, published


def configure(parser: argparse.ArgumentParser) -> None:
    """The files, the hashes of what was checked, the index, and where the copies go."""
    parser.add_argument("folder", type=Path, help="the folder with every file of the release")
    parser.add_argument(
        "--checked",
        type=Path,
        required=True,
        metavar="FILE",
        help=f"the {checks.FILE} that check-release wrote",
    )
    parser.add_argument(
        "--index", required=True, metavar="URL", help="the index, such as https://pypi.org/simple"
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="a new or empty folder, which gets a folder for each project",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print a line for each file: to be uploaded, or already there."""
    root, output = arguments.root, arguments.root / arguments.output
    if output.is_dir() and any(output.iterdir()):
        raise PackagingError(
            f"{output}: expected an empty folder, found files; everything in it is uploaded"
        )
    hashes = checks.read(root / arguments.checked)
    files = sorted((root / arguments.folder).iterdir())
    checks.require(files, hashes)
    missing = published.absent(files, arguments.index)
    output.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file in missing:
            folder = output / project_of(file.name)
            folder.mkdir(exist_ok=True)
            publish.copy(file, folder, hashes[file.name])
        print(f"{'to upload' if file in missing else 'there already'}: {file.name}")
