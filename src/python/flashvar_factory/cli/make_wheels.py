"""Build wheels: the project's own if it has one, and one per selected architecture."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.build import wheel
from flashvar_factory.cli import selected


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments, and where the wheels go."""
    selected.add_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("dist"))


def run(arguments: argparse.Namespace) -> None:
    """Build, and print each wheel with its size."""
    selection = selected.read(arguments)
    builds = selection.for_release()
    compiler = selection.compiler()
    output = arguments.root / arguments.output
    made = []
    if selection.first_shard() and wheel.has_pure(arguments.root):
        made.append(wheel.sdist(selection.config, root=arguments.root, output=output))
        made.append(wheel.pure(selection.config, root=arguments.root, output=output))
    made += [
        wheel.binary(
            selection.config,
            one,
            compiler,
            root=arguments.root,
            output=output,
            jobs=selection.given.jobs,
        )
        for one in builds
    ]
    for path in made:
        print(f"{path.stat().st_size:>12,} {path}")
