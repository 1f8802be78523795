"""Compile a selection for development into build/dev/site."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.build import development
from flashvar_factory.cli import selected
from flashvar_factory.cli.selected import Selected


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments."""
    selected.add_arguments(parser, selected.DEVELOPMENT)


def run(arguments: argparse.Namespace) -> None:
    """Build, with ninja's progress."""
    build_all(selected.read(arguments))


def build_all(selection: Selected) -> list[Path]:
    """The folders of library and manifest, one per architecture."""
    builds = selection.for_development()
    compiler = selection.compiler()
    print(f"nvcc {compiler.version} of {compiler.origin}: {compiler.nvcc}")
    packages = []
    for one in builds:
        print(f"{one.kind.name}: {', '.join(kernel.name for kernel in one.kernels)}")
        packages.append(
            development.build(
                selection.config, one, compiler, root=selection.root, jobs=selection.arguments.jobs
            )
        )
    return packages
