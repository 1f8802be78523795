"""The part of pyproject.toml that all binary distributions share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flashvar.binaries.kinds import Architecture
from flashvar_factory.config import torch_coupling
from flashvar_factory.config.expand import Build
from flashvar_factory.config.schema import Config

README_TYPE: Final = "text/markdown"
METADATA_VERSION: Final = "2.4"  # the first with License-Expression, and no newer
REQUIRES_PYTHON: Final = ">=3.10"
# What a wheel ships of the checkout's texts, as far as the project has them.
LICENSE_FILES: Final = ("LICENSE", "THIRD_PARTY_NOTICES.md")


def license_files(root: Path) -> list[str]:
    """The names of the texts that are there."""
    return [name for name in LICENSE_FILES if (root / name).is_file()]


def summary_of(project: str, architecture: Architecture) -> str:
    """What a binary distribution is, in a line."""
    major, minor = architecture.capability
    return f"Compiled {project} kernels for compute capability {major}.{minor}"


def requirements_of(torch: str | None) -> list[str]:
    """What it asks of its environment: nothing, or the oldest torch that its library calls."""
    return [] if torch is None else [torch_coupling.requirement(torch)]


def readme_of(project: str, distribution: str, architecture: Architecture) -> str:
    """What an index shows of it."""
    return (
        f"# {distribution}\n\n{summary_of(project, architecture)}. It has no Python code. The "
        f"entry point in the group `{project}.binaries` names the folder of its library.\n"
    )


def head(
    build: Build,
    config: Config,
    version: str,
    *,
    requires: Sequence[str],
    licenses: Sequence[str],
) -> str:
    """[build-system], [project] with the entry point, and [tool.scikit-build]'s fixed keys.

    What is written after it continues [tool.scikit-build].
    """
    project = config.project.name
    summary = summary_of(project, build.target.architecture)
    readme = readme_of(project, build.distribution, build.target.architecture)
    return f"""\
[build-system]
requires = {json.dumps(list(requires), indent=2)}
build-backend = "scikit_build_core.build"

[project]
name = {string(build.distribution)}
version = {string(version)}
description = {string(summary)}
readme = {{ text = {string(readme)}, content-type = {string(README_TYPE)} }}
license = {string(config.project.license)}
license-files = {json.dumps(list(licenses))}
requires-python = {string(REQUIRES_PYTHON)}
dependencies = {json.dumps(requirements_of(build.torch))}

[project.entry-points.{string(f"{project}.binaries")}]
{build.kind.name} = {string(build.stem)}

[tool.scikit-build]
# The manifest holds the hash of the library as it was linked.
install.strip = false
wheel.packages = []
wheel.py-api = "py3"
wheel.reproducible = true
"""


def string(text: str) -> str:
    """A TOML basic string; JSON writes the same, but for letters beyond 16 bits."""
    return json.dumps(text, ensure_ascii=False)
