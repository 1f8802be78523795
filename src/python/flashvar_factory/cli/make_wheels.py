"""Build wheels: the project's own if it has one, and one per selected architecture."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flashvar_factory.build import wheel
from flashvar_factory.cli import selected
from flashvar_factory.errors import BuildError


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments, and where the wheels go."""
    selected.add_arguments(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("dist"), help="folder of the files (default: dist)"
    )
    parser.add_argument(
        "--project-only",
        action="store_true",
        help="sdist and pure wheels only: no compiler",
    )


def run(arguments: argparse.Namespace) -> None:
    """Build, and print each wheel with its size."""
    selection, root = selected.read(arguments), arguments.root
    builds = () if arguments.project_only else selection.for_release()
    compiler = None if arguments.project_only else selection.compiler()
    output = root / arguments.output
    _require_writable(output)
    made = []
    if selection.first_shard():
        made += [make(output) for make in wheel.makers(selection.config, root).values()]
    if compiler is not None:
        jobs = selection.arguments.jobs
        made += [
            wheel.binary(selection.config, one, compiler, root=root, output=output, jobs=jobs)
            for one in builds
        ]
    for path in made:
        print(f"{path.stat().st_size:>12,} {path}")


def _require_writable(folder: Path) -> None:
    """Check that files can be added to the folder, or it can be made: a build may take an hour."""
    nearest = next(one for one in (folder, *folder.parents) if one.exists() or one.is_symlink())
    if not nearest.is_dir():
        raise BuildError(
            f"{nearest}: expected a folder, found something else; name another with --output"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BuildError(
            f"{nearest}: expected a folder that can be written, found no permission; name another "
            "with --output"
        )
