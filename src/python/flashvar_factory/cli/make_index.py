"""Make a static package index of the wheels in a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory import index


def configure(parser: argparse.ArgumentParser) -> None:
    """Where the wheels are, and where the pages go."""
    parser.add_argument("--wheels", type=Path, default=Path("dist"))
    parser.add_argument("--output", type=Path, default=Path("build/index"))


def run(arguments: argparse.Namespace) -> None:
    """Write the pages, and say how to install from them."""
    site = arguments.root / arguments.output
    for name in index.write(arguments.root / arguments.wheels, site):
        print(f"  {name}")
    print(f"pip install --index-url {site.as_uri()}/ --extra-index-url https://pypi.org/simple ...")
