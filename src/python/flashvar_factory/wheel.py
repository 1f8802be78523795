"""Makes wheels: one of every binary distribution, and the pure one of the project."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from flashvar.errors import PackagingError
from flashvar_factory import cmake
from flashvar_factory.configure import Plan, configure, write_if_changed
from flashvar_factory.expand import Build
from flashvar_factory.schema import Config
from flashvar_factory.toolchain import Toolchain

FOLDER: Final = "build/wheels"
BACKEND: Final = "scikit-build-core==1.1.2"
REQUIRES_PYTHON: Final = ">=3.10"
LICENSE_FILE: Final = "LICENSE"


def tag(machine: str) -> str:
    """The tag of a binary wheel: any Python, glibc 2.28 or newer."""
    return f"py3-none-manylinux_2_28_{machine}"


def binary(
    config: Config,
    build: Build,
    toolchain: Toolchain,
    *,
    root: Path,
    output: Path,
    jobs: int | None,
) -> Path:
    """Build the wheel of one binary distribution into `output`."""
    directory = root / FOLDER / build.distribution
    plan = configure(config, build, toolchain, root=root, directory=directory)
    write_if_changed(directory / "pyproject.toml", pyproject(plan, config, toolchain, root))
    if (root / LICENSE_FILE).is_file():
        shutil.copyfile(root / LICENSE_FILE, directory / LICENSE_FILE)
    settings = [f"wheel.tags={tag(platform.machine())}", f"build.tool-args=-j{_jobs(jobs)}"]
    return _build(directory, build.stem, output, settings)


def pure(config: Config, *, root: Path, output: Path) -> Path:
    """Build the wheel of the project itself, which holds no binary, into `output`."""
    return _build(root, config.project.name, output, [])


def pyproject(plan: Plan, config: Config, toolchain: Toolchain, root: Path) -> str:
    """The project of one binary distribution: CMake's output, found by an entry point."""
    build, project = plan.build, config.project.name
    major, minor = build.architecture.capability
    description = f"Compiled {project} kernels for compute capability {major}.{minor}"
    defines = "\n".join(
        f"{key} = {_string(value)}" for key, value in cmake.definitions(plan, toolchain).items()
    )
    license_files = [LICENSE_FILE] if (root / LICENSE_FILE).is_file() else []
    return f"""\
[build-system]
requires = [{_string(BACKEND)}]
build-backend = "scikit_build_core.build"

[project]
name = {_string(build.distribution)}
version = {_string(plan.version)}
description = {_string(description)}
license = {_string(config.project.license)}
license-files = {json.dumps(license_files)}
requires-python = {_string(REQUIRES_PYTHON)}

[project.entry-points.{_string(f"{project}.binaries")}]
{build.architecture.name} = {_string(build.stem)}

[tool.scikit-build]
build-dir = "cmake"
cmake.source-dir = {_string(root.as_posix())}
# The manifest holds the hash of the library as it was linked.
install.strip = false
wheel.packages = []
wheel.py-api = "py3"

[tool.scikit-build.cmake.define]
{defines}
"""


def _string(text: str) -> str:
    """A TOML basic string; JSON writes the same."""
    return json.dumps(text)


def _jobs(jobs: int | None) -> int:
    return jobs or cmake.processors()


def _build(project: Path, stem: str, output: Path, settings: Iterable[str]) -> Path:
    """Run the build frontend on `project`; the one new wheel, older ones of `stem` removed."""
    fresh = output / f".{stem}"
    shutil.rmtree(fresh, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(fresh)]
    command += [f"-C{setting}" for setting in settings]
    environment = {**os.environ, "PATH": os.pathsep.join([_scripts(), os.environ.get("PATH", "")])}
    sys.stdout.flush()
    done = subprocess.run([*command, str(project)], env=environment)
    made = sorted(fresh.glob("*.whl"))
    if done.returncode != 0 or len(made) != 1:
        raise PackagingError(
            f"{stem}: expected one wheel, found {len(made)} and exit code {done.returncode} of "
            "the build, see above"
        )
    for stale in output.glob(f"{stem}-*.whl"):
        stale.unlink()
    wheel = made[0].replace(output / made[0].name)
    fresh.rmdir()
    return wheel


def _scripts() -> str:
    """Where cmake and ninja of this Python's environment are."""
    return str(Path(sys.executable).parent)
