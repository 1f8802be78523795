"""Prove that the files of a folder are the release of this commit, before any is published."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from flashvar_factory.config import schema
from flashvar_factory.release import proof, pythons
from flashvar_factory.release.proof import Candidate


def configure(parser: argparse.ArgumentParser) -> None:
    """The files, a second build of them, the tag, and where they will go."""
    parser.add_argument("folder", type=Path, help="every file of the release")
    parser.add_argument(
        "--again", type=Path, required=True, metavar="FOLDER", help="the files of a second build"
    )
    parser.add_argument("--tag", help="v<version>, on this commit; leave it out for a rehearsal")
    parser.add_argument(
        "--index",
        action="append",
        default=[],
        metavar="URL",
        help="where the files will be published, such as https://pypi.org/simple; may be repeated",
    )
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        help="install into this one, instead of each Python 3.10 or newer found; may be repeated",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("build/proof"), help="for the notes and the hashes"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print each check; then what was proved, the notes and the SBOMs are written."""
    root, asked = arguments.root, arguments.python
    output = root / arguments.output
    for name in (proof.FILE, proof.NOTES):
        (output / name).unlink(missing_ok=True)
    shutil.rmtree(output / proof.SBOMS, ignore_errors=True)
    candidate = Candidate(
        root=root,
        config=schema.read(root / schema.FILE_NAME),
        folder=root / arguments.folder,
        again=root / arguments.again,
        tag=arguments.tag,
        indexes=tuple(arguments.index),
        pythons=pythons.named(asked) if asked else pythons.find(os.environ),
    )
    document = proof.prove(candidate)
    for path in proof.write(candidate, document, output):
        print(path)
