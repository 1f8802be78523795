"""Write the plans of a development build, without compiling."""

from __future__ import annotations

import argparse

from flashvar_factory import at_work, build
from flashvar_factory import configure as configuring
from flashvar_factory.cli import selected


def configure(parser: argparse.ArgumentParser) -> None:
    """Words."""
    selected.take_words(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print the path of each plan."""
    selection = selected.read(arguments)
    compiler = selection.compiler()
    for one in selection.for_development():
        directory = arguments.root / build.FOLDER / one.architecture.name
        with at_work.alone(directory):
            plan = configuring.configure(
                selection.config,
                one,
                compiler,
                root=arguments.root,
                directory=directory,
                lineinfo=True,
            )
        print(plan.cmake)
