"""Writes the plan of one build into its build directory, and touches only what changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar.binaries.manifest import Toolkit
from flashvar_factory.build import render, source
from flashvar_factory.config import version
from flashvar_factory.config.expand import Build
from flashvar_factory.config.schema import Config
from flashvar_factory.errors import BuildError
from flashvar_factory.toolchain import torch_headers
from flashvar_factory.toolchain.nvcc import Toolchain

CROSS_FILE: Final = "cross.cmake"
# What CMake, ninja, the linker, or the shell that nvcc calls take for the end of a path, however it
# is quoted.
_SEPARATORS: Final = frozenset(";,\"$\\'()&|<>[]`")


@dataclass(frozen=True)
class BuildPlan:
    """A build whose generated files are on disk."""

    build: Build
    version: str  # with its local label
    directory: Path  # absolute

    @property
    def cmake(self) -> Path:
        """What CMake is given as FLASHVAR_PLAN."""
        return self.directory / "plan.cmake"


def configure(
    config: Config,
    build: Build,
    toolchain: Toolchain,
    *,
    root: Path,
    directory: Path,
    lineinfo: bool = False,
) -> BuildPlan:
    """Write instances/*.cu, *_kernels.inc, build_info.inc, plan.cmake and plan.json."""
    directory = directory.resolve()
    found = [sign for sign in str(directory) if sign in _SEPARATORS or not sign.isprintable()]
    if found:
        raise BuildError(
            f"{str(directory)!r}: expected a path that prints, without any of "
            f"{' '.join(sorted(_SEPARATORS))}, found {found[0]!r}; work in another folder"
        )
    labeled = version.of_build(version.read(config, root), build, config)
    older = build.target.toolkit
    toolkit = Toolkit("nvcc", toolchain.version, None if older is None else older.version)
    facts = render.Facts(
        version=labeled,
        source=source.gather(root, source.identity(build, labeled, toolkit, lineinfo=lineinfo)),
        toolkit=toolkit,
        lineinfo=lineinfo,
        torch=None if build.torch is None else torch_headers.find(build.torch, toolchain),
    )
    files = {
        f"instances/{kernel.name}.cu": render.instance(kernel, build, config)
        for kernel in build.kernels
    }
    files |= render.kernel_tables(build.kernels, config.ops)
    files |= {
        "build_info.inc": render.build_info(build, facts),
        "plan.json": render.plan_json(build, facts, config),
        "plan.cmake": render.plan_cmake(build, facts, config, directory),
    }
    if toolchain.cross is not None:
        files[CROSS_FILE] = render.cross_cmake(toolchain.cross)
    for name, text in files.items():
        write_if_changed(directory / name, text)
    for stale in (directory / "instances").glob("*.cu"):
        if f"instances/{stale.name}" not in files:
            stale.unlink()
    return BuildPlan(build, labeled, directory)


def write_if_changed(path: Path, text: str) -> bool:
    """Write `text` unless the file holds it already, so that ninja sees no change."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True
