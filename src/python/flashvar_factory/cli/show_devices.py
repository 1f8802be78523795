"""Print the compute capability of every CUDA device, one per line."""

from __future__ import annotations

import argparse

from flashvar_factory.config import this_machine


def configure(parser: argparse.ArgumentParser) -> None:
    """Nothing to ask."""


def run(arguments: argparse.Namespace) -> None:
    """Print them."""
    del arguments
    for major, minor in this_machine.capabilities():
        print(f"{major}.{minor}")
