"""Say what a selection builds (everything, when none is given)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from flashvar_factory import version
from flashvar_factory.cli import selected
from flashvar_factory.expand import Build
from flashvar_factory.schema import Config


def configure(parser: argparse.ArgumentParser) -> None:
    """Words, and `--json` for machines."""
    selected.take_words(parser)
    parser.add_argument("--json", action="store_true", help="for machines")


def run(arguments: argparse.Namespace) -> None:
    """Print one line per kernel, or one document."""
    selection = selected.read(arguments)
    config = selection.config
    release = version.read(config, arguments.root)
    builds = selection.for_release()
    if arguments.json:
        print(json.dumps(document(config, release, builds), indent=1))
        return
    for one in builds:
        labelled = version.of_build(release, one, config)
        print(f"{one.distribution} {labelled}: code {one.code}, {len(one.kernels)} kernels")
        for kernel in one.kernels:
            print(f"  {kernel.name}")


def document(config: Config, release: str, builds: Sequence[Build]) -> dict[str, object]:
    """The builds as plain data."""
    return {
        "project": config.project.name,
        "version": release,
        "builds": [
            {
                "architecture": one.architecture.name,
                "code": one.code,
                "code_kinds": one.code_kinds,
                "family": one.family,
                "shared_memory": one.shared_memory,
                "distribution": one.distribution,
                "version": version.of_build(release, one, config),
                "kernels": [
                    {"name": kernel.name, "op": kernel.op, **dict(kernel.axes)}
                    for kernel in one.kernels
                ],
            }
            for one in builds
        ],
    }
