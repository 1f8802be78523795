"""Write the plans of a development build, without compiling."""

from __future__ import annotations

import argparse

from flashvar_factory.build import configure as configuring
from flashvar_factory.build import development, process
from flashvar_factory.cli import selected


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments."""
    selected.add_arguments(parser, selected.DEVELOPMENT)


def run(arguments: argparse.Namespace) -> None:
    """Print the path of each plan."""
    selection = selected.read(arguments)
    compiler = selection.compiler()
    for one in selection.for_development():
        directory = arguments.root / development.FOLDER / one.kind.name
        with process.locked(directory):
            plan = configuring.configure(
                selection.config,
                one,
                compiler,
                root=arguments.root,
                directory=directory,
                lineinfo=True,
            )
        print(plan.cmake)
