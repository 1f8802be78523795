"""Build a selection, make this Python environment find it, and show that it loads."""

from __future__ import annotations

import argparse

from flashvar_factory.build import development
from flashvar_factory.cli import build_dev, selected


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments."""
    selected.add_arguments(parser, selected.DEVELOPMENT)


def run(arguments: argparse.Namespace) -> None:
    """Build, link, verify."""
    selection = selected.read(arguments)
    packages = build_dev.build_all(selection)
    development.link_into_environment(
        development.site(arguments.root), selection.config.project.name
    )
    for package in packages:
        print(development.check_loads(package))
    print(f"compile commands: {arguments.root / 'build' / 'compile_commands.json'}")
