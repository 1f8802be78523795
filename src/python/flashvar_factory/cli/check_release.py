"""Check that the files of a folder are the release of this commit, before any is published."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.cli import target_pythons
from flashvar_factory.config import schema
from flashvar_factory.release import checks
from flashvar_factory.release.checks import ReleaseFiles


def configure(parser: argparse.ArgumentParser) -> None:
    """The files, a second build of them, the tag, and where they will go."""
    parser.add_argument("folder", type=Path, help="the folder with every file of the release")
    parser.add_argument(
        "--second-build",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the files of a second build",
    )
    parser.add_argument("--tag", help="v<version>, on this commit; leave it out for a rehearsal")
    parser.add_argument(
        "--index",
        action="append",
        default=[],
        metavar="URL",
        help="where the files will be published, such as https://pypi.org/simple; may be repeated",
    )
    target_pythons.add_argument(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/checked"),
        help="folder for the notes and the hashes (default: build/checked)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print each check; then the hashes, the notes and the SBOMs are written."""
    root = arguments.root
    output = root / arguments.output
    for name in (checks.FILE, checks.NOTES):
        (output / name).unlink(missing_ok=True)
    for path in (output / checks.SBOMS).glob("*.cdx.json"):
        path.unlink()
    files = ReleaseFiles(
        root=root,
        config=schema.read(root / schema.FILE_NAME),
        folder=root / arguments.folder,
        second_build=root / arguments.second_build,
        tag=arguments.tag,
        indexes=tuple(arguments.index),
        pythons=target_pythons.read(arguments),
    )
    document = checks.check_all(files)
    for path in checks.write(files, document, output):
        print(path)
