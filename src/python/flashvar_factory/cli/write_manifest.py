"""Describe a linked library (CMake calls this)."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.build import exports, manifest_writer


def configure(parser: argparse.ArgumentParser) -> None:
    """The files to read and the one to write."""
    for option in ("--plan-json", "--library", "--objects-dir", "--output"):
        parser.add_argument(option, type=Path, required=True)


def run(arguments: argparse.Namespace) -> None:
    """Check what the library exports, and write the manifest."""
    exports.check(arguments.plan_json, arguments.library)
    manifest_writer.write(
        plan_json=arguments.plan_json,
        library=arguments.library,
        objects_dir=arguments.objects_dir,
        output=arguments.output,
    )
