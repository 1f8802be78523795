"""Build wheels in a container by cibuildwheel: repaired, audited, loaded."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from flashvar.errors import ConfigurationError
from flashvar_factory.build import self_contained, source
from flashvar_factory.cli import selected
from flashvar_factory.config import this_machine
from flashvar_factory.errors import PackagingError, ToolchainError
from flashvar_factory.toolchain import container

FOLDER: Final = "build/cibuildwheel"


def configure(parser: argparse.ArgumentParser) -> None:
    """Selection arguments, and where the wheels go."""
    selected.add_arguments(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("dist"), help="folder of the files (default: dist)"
    )


def run(arguments: argparse.Namespace) -> None:
    """A self-contained project for each wheel, and cibuildwheel in it."""
    selection = selected.read(arguments)
    if selection.arguments.platform not in (None, this_machine.PROCESSOR):
        raise ConfigurationError(
            f"platform={selection.arguments.platform}: expected {this_machine.PROCESSOR}, "
            "found another processor: containers run on this machine's; `wheels` cross-compiles"
        )
    choice = container.choose(container.gather(os.environ))
    if choice.why_not:
        raise ToolchainError(choice.why_not)
    folder = arguments.root / FOLDER
    settings = container.settings(choice, folder)
    scripts = str(Path(sys.executable).parent)  # uv is there
    environment = {**os.environ, **settings}
    environment.pop("UV_PYTHON", None)  # nox's: cibuildwheel makes environments of its own
    environment["PATH"] = os.pathsep.join([scripts, environment.get("PATH", "")])
    committed = source.committed(arguments.root)
    if committed is not None:  # the time of every file in the archive
        environment.setdefault("SOURCE_DATE_EPOCH", str(committed))
    for build in selection.for_release():
        project = folder / build.platform / build.distribution
        self_contained.write(selection.config, build, root=arguments.root, output=project)
        command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--output-dir"]
        command += [str((arguments.root / arguments.output).resolve()), "."]
        done = subprocess.run(command, cwd=project, env=environment)
        if done.returncode != 0:
            raise PackagingError(
                f"{build.distribution}: expected a wheel of cibuildwheel, found its exit code "
                f"{done.returncode}, see above"
            )
