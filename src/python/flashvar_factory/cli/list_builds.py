"""List what a selection builds: without one, every wheel for this machine's processor."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from flashvar_factory.cli import selected
from flashvar_factory.config import version
from flashvar_factory.config.expand import Build, expand_platforms
from flashvar_factory.config.schema import Config
from flashvar_factory.release import members

# GitHub's own machines: each wheel is built and loaded on its processor.
RUNNERS: Final = {"x86_64": "ubuntu-24.04", "aarch64": "ubuntu-24.04-arm"}


def configure(parser: argparse.ArgumentParser) -> None:
    """SelectionArguments, and the forms for machines."""
    selected.add_arguments(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--matrix",
        action="store_true",
        help="print a GitHub matrix, a job for each binary wheel, of all processors",
    )
    form.add_argument(
        "--projects",
        action="store_true",
        help="print the names of all projects that a release has files of, as JSON",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print one line per kernel, or one document."""
    selection = selected.read(arguments)
    config = selection.config
    if arguments.matrix:
        builds = selection.require(expand_platforms(selection.arguments, config))
        print(json.dumps(matrix(builds)))
        return
    if arguments.projects:
        builds = selection.require(expand_platforms(selection.arguments, config))
        print(json.dumps(projects(config, builds, arguments.root)))
        return
    release = version.read(config, arguments.root)
    builds = selection.for_release()
    if arguments.json:
        print(json.dumps(document(config, release, builds), indent=1))
        return
    for one in builds:
        labeled = version.of_build(release, one, config)
        code = one.target.architecture.code
        print(f"{one.distribution} {labeled}: code {code}, {len(one.kernels)} kernels")
        for kernel in one.kernels:
            print(f"  {kernel.name}")


def matrix(builds: Iterable[Build]) -> dict[str, list[dict[str, str]]]:
    """The strategy matrix of a GitHub workflow."""
    return {
        "include": [
            {
                "kind": build.kind.name,
                "distribution": build.distribution,
                "platform": build.platform,
                "wheel": f"{build.stem}-*_{build.platform}.whl",
                "runner": RUNNERS[build.platform],
            }
            for build in builds
        ]
    }


def projects(config: Config, builds: Sequence[Build], root: Path) -> list[str]:
    """The names under which an index has the files of a release."""
    return sorted({member.distribution for member in members.expected(config, builds, root)})


def document(config: Config, release: str, builds: Sequence[Build]) -> dict[str, object]:
    """The builds as plain data."""
    return {
        "project": config.project.name,
        "version": release,
        "builds": [
            {
                "kind": one.kind.name,
                "code": one.target.architecture.code,
                "code_kinds": one.code_kinds,
                "platform": one.platform,
                "family": one.target.family,
                "shared_memory": one.target.shared_memory,
                "distribution": one.distribution,
                "toolkit": None if one.target.toolkit is None else one.target.toolkit.ptxas,
                "version": version.of_build(release, one, config),
                "kernels": [
                    {"name": kernel.name, "op": kernel.function, **dict(kernel.axes)}
                    for kernel in one.kernels
                ],
            }
            for one in builds
        ],
    }
