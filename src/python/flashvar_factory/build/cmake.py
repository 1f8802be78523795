"""Runs CMake and Ninja for one plan: configure when needed, compile, install."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flashvar_factory.build import compiled_from, process
from flashvar_factory.build.configure import CROSS_FILE, BuildPlan, write_if_changed
from flashvar_factory.errors import BuildError, ToolchainError
from flashvar_factory.toolchain import compiled_by, host_compiler
from flashvar_factory.toolchain.nvcc import Toolchain

FOLDER: Final = "cmake"  # in that of the plan


def definitions(plan: BuildPlan, toolchain: Toolchain) -> dict[str, str]:
    """The -D variables of a build: the same for a development build and for a wheel."""
    found = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "CMAKE_CUDA_COMPILER": str(toolchain.nvcc),
        "FLASHVAR_PLAN": str(plan.cmake),
        "Python_EXECUTABLE": sys.executable,
    }
    if toolchain.launcher:
        found["CMAKE_CXX_COMPILER_LAUNCHER"] = ";".join(toolchain.launcher)
        # Behind ptxas_report.py, which reads what the cache repeats of ptxas.
        found["FLASHVAR_CUDA_LAUNCHER"] = ";".join(toolchain.launcher)
    if toolchain.cross is not None:
        found["CMAKE_TOOLCHAIN_FILE"] = str(plan.directory / CROSS_FILE)
    elif toolchain.library_dir is not None:
        # CMake splits it as a shell does.
        found["CMAKE_CUDA_FLAGS"] = f"-L{shlex.quote(str(toolchain.library_dir))}"
    return found


def tool(name: str) -> str:
    """The path of cmake or ninja: of this Python's environment, else of PATH."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise ToolchainError(f"expected {name} on PATH, found none; pip install cmake ninja")
    return found


def claim(plan: BuildPlan, toolchain: Toolchain, root: Path) -> Path:
    """The folder for CMake, emptied if ninja would not see what changed since it was filled.

    That is other compilers, other variables, and sources with older times.
    """
    folder = plan.directory / FOLDER
    if toolchain.cross is None:
        host_compiler.require(os.environ)
    compiled_by.claim(folder, compiled_by.facts(toolchain) | definitions(plan, toolchain))
    compiled_from.claim(folder, root)
    return folder


def build(plan: BuildPlan, toolchain: Toolchain, *, root: Path, jobs: int | None) -> Path:
    """Compile the plan with ninja's progress on stdout; the CMake build directory."""
    directory = claim(plan, toolchain, root)
    _configure(plan, toolchain, root, directory)
    command = [tool("ninja"), "-C", str(directory), f"-j{jobs or processors()}"]
    _run(command, f"compiling {plan.build.distribution}")
    return directory


def install(directory: Path, prefix: Path) -> None:
    """Copy library and manifest of a finished build under `prefix`."""
    command = [tool("cmake"), "--install", str(directory), "--prefix", str(prefix)]
    _run(command, "installing", quiet=True)


def processors() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _configure(plan: BuildPlan, toolchain: Toolchain, root: Path, directory: Path) -> None:
    """Run CMake unless it ran here with the same command; what it includes, ninja watches."""
    stamp = directory / "flashvar_configured"
    command = [tool("cmake"), "-G", "Ninja", "-S", str(root), "-B", str(directory)]
    command += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    command += [f"-D{key}={value}" for key, value in definitions(plan, toolchain).items()]
    record = "\n".join([*command, ""])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == record:
        return
    stamp.unlink(missing_ok=True)
    _run([*command, "--fresh"], f"configuring {plan.build.distribution}", quiet=True)
    write_if_changed(stamp, record)


def _run(command: list[str], doing: str, *, quiet: bool = False) -> None:
    """Run a command; with `quiet`, show what it printed only when it fails."""
    done = process.run(command, quiet=quiet)
    if done.returncode != 0:
        printed = "\n".join(_indented(done.stdout)) if quiet else "  see above"
        raise BuildError(f"{doing} failed with exit code {done.returncode}:\n{printed}")


def _indented(text: str) -> Iterator[str]:
    return (f"  {line}" for line in text.splitlines())
