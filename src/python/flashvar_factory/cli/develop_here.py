"""Build a selection, make this Python environment find it, and show that it loads."""

from __future__ import annotations

import argparse

from flashvar_factory import build, develop
from flashvar_factory.cli import build_dev, selected


def configure(parser: argparse.ArgumentParser) -> None:
    """Words."""
    selected.take_words(parser)


def run(arguments: argparse.Namespace) -> None:
    """Build, link, verify."""
    selection = selected.read(arguments)
    packages = build_dev.build_all(selection)
    develop.link_into_environment(build.site(arguments.root), selection.config.project.name)
    for package in packages:
        print(develop.verify(package))
    print(f"compile commands: {arguments.root / 'build' / 'compile_commands.json'}")
