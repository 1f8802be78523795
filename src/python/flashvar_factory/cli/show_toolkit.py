"""Print the nvcc that would be used."""

from __future__ import annotations

import argparse

from flashvar_factory.cli import selected


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments, of which toolkit= matters."""
    selected.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print version, origin and path."""
    compiler = selected.read(arguments).compiler()
    print(f"nvcc {compiler.version} of {compiler.origin}: {compiler.nvcc}")
