"""How long building takes: one head dim cold, after an edit, unchanged; all, also from a cache.

The sources are copied to a temporary folder first: the working tree's builds stay as they are, and
every run starts from nothing. Times are wall clock of the command, Python's start included. The
compiler has to be there: fetching a toolkit is no part of the figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks.environment import ROOT
from benchmarks.report import BenchmarkError, Options, Report, Row, chosen

_OUTSIDE: Final = frozenset({"build", "dist", "benchmarks", "tests", "docs"})  # at the top
# Where the factory keeps a toolkit from PyPI.
_TOOLKIT: Final = ROOT / "build" / "toolkit"
_KERNEL_HEADER: Final = "src/cuda/*/attention/fwd.cuh"
_ONE: Final = ("build", "hdim=64")
_CACHED: Final = ("wheels", "all", "cache=ccache")


@dataclass(frozen=True)
class Step:
    """A command of the factory, and what is done to the sources before its clock starts."""

    name: str
    command: tuple[str, ...]
    prepare: Callable[[Path], None]
    needs: str | None = None  # the step that has to run before this one, timed or not


def _nothing(tree: Path) -> None:
    """Leaves the tree as the step before left it."""


def _forget(tree: Path) -> None:
    """Removes what was built."""
    for folder in ("build/dev", "build/wheels", "dist"):
        shutil.rmtree(tree / folder, ignore_errors=True)


def _edit_headers(tree: Path) -> None:
    """Changes the kernel's header of every family, as an edit would."""
    headers = sorted(tree.glob(_KERNEL_HEADER))
    if not headers:
        raise BenchmarkError(
            f"expected kernel headers at {_KERNEL_HEADER}, found none: update that path"
        )
    for header in headers:
        with header.open("a", encoding="utf-8") as file:
            file.write("\n// edited\n")


_STEPS: Final = (
    Step("hdim64-cold", _ONE, _forget),
    Step("hdim64-header", _ONE, _edit_headers, needs="hdim64-cold"),
    Step("hdim64-unchanged", _ONE, _nothing, needs="hdim64-cold"),
    Step("wheels-all", ("wheels", "all"), _forget),
    # The first fills a cache of its own; the second finds the tree as it was cloned.
    Step("wheels-all-to-cache", _CACHED, _forget),
    Step("wheels-all-from-cache", _CACHED, _forget, needs="wheels-all-to-cache"),
)


def run(options: Options) -> Report:
    """Runs the chosen steps, and untimed what they need, in a copy of the sources.

    Raises:
        BenchmarkError: when a command fails; with the end of what it printed.
    """
    names = chosen([step.name for step in _STEPS], options.only)
    needed = {step.needs for step in _STEPS if step.name in names}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="flashvar-bench-") as folder:
        tree = Path(folder, "tree")
        copy_sources(ROOT, tree)
        if _TOOLKIT.is_dir():
            (tree / "build").mkdir()
            (tree / "build" / _TOOLKIT.name).symlink_to(_TOOLKIT)
        for step in _STEPS:
            if step.name not in names and step.name not in needed:
                continue
            step.prepare(tree)
            seconds = _run(step.command, tree)
            if step.name in names:
                command = " ".join(["python -m flashvar_factory", *step.command])
                rows.append({"step": step.name, "command": command, "seconds": seconds})
    return Report(
        rows=rows,
        columns=("step", "command", "seconds"),
        lines=[(str(r["step"]), str(r["command"]), f"{r['seconds']:.1f}") for r in rows],
    )


def copy_sources(root: Path, tree: Path) -> None:
    """Copy what a build reads: neither what was built, nor what is only tested or read."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        outside = _OUTSIDE if Path(folder) == root else frozenset({"__pycache__"})
        return {name for name in names if name.startswith(".") or name in outside}

    shutil.copytree(root, tree, ignore=ignored)


def _run(command: Sequence[str], tree: Path) -> float:
    """Seconds that `python -m flashvar_factory <command>` took in the tree."""
    environment = {
        **os.environ,
        "CCACHE_DIR": str(tree.parent / "ccache"),
        "PYTHONPATH": str(tree / "src" / "python"),
    }
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "flashvar_factory", *command],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = perf_counter() - start
    if done.returncode != 0:
        raise BenchmarkError(
            f"expected `python -m flashvar_factory {' '.join(command)}` to succeed, it ended with "
            f"{done.returncode}: repair it first. It printed last:\n{done.stdout[-3000:]}"
        )
    return seconds
