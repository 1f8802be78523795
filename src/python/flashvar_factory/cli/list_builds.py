"""Say what a selection builds (everything, when none is given)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from flashvar_factory import schema, version
from flashvar_factory.cli import selected
from flashvar_factory.expand import Build, expand, select_all
from flashvar_factory.schema import Config
from flashvar_factory.words import Words

# GitHub's own machines: each wheel is built and loaded on its processor.
RUNNERS: Final = {"x86_64": "ubuntu-24.04", "aarch64": "ubuntu-24.04-arm"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Words, and the forms for machines."""
    selected.take_words(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for machines")
    form.add_argument(
        "--matrix", action="store_true", help="a job for each wheel of all platforms, for GitHub"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print one line per kernel, or one document."""
    selection = selected.read(arguments)
    config = selection.config
    if arguments.matrix:
        print(json.dumps(matrix(config, selection.words)))
        return
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


def matrix(config: Config, words: Words) -> dict[str, list[dict[str, str]]]:
    """The strategy matrix of a GitHub workflow; of every platform, unless the words name one."""
    platforms = schema.PLATFORMS if words.platform is None else (words.platform,)
    builds = [
        build
        for platform in platforms
        for build in expand(config, select_all(replace(words, platform=platform), config))
    ]
    return {
        "include": [
            {
                "architecture": build.architecture.name,
                "distribution": build.distribution,
                "platform": build.platform,
                "runner": RUNNERS[build.platform],
            }
            for build in builds
        ]
    }


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
                "platform": one.platform,
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
