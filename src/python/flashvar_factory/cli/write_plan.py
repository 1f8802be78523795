"""Write the plan of one wheel, and CMake's variables for it (CMake calls this)."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashvar_factory.build import cmake, render
from flashvar_factory.build import configure as configuring
from flashvar_factory.cli import selected
from flashvar_factory.toolchain import older_cuda


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments, and the folder of the plan."""
    selected.add_arguments(parser, "none; name one wheel")
    parser.add_argument("--output", type=Path, required=True)


def run(arguments: argparse.Namespace) -> None:
    """Write plan.cmake and what it needs, and variables.cmake."""
    selection = selected.read(arguments)
    (one,) = selection.for_release()
    compiler = older_cuda.complete(selection.compiler(), one.target.toolkit, arguments.root)
    plan = configuring.configure(
        selection.config, one, compiler, root=arguments.root, directory=arguments.output
    )
    definitions = cmake.definitions(plan, compiler)
    lines = [f"{render.cmake_set(key, value)}\n" for key, value in definitions.items()]
    configuring.write_if_changed(plan.directory / "variables.cmake", "".join(lines))
    print(f"nvcc {compiler.version} of {compiler.origin}: {compiler.nvcc}")
