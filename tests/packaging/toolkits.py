"""CUDA toolkits laid out as PyPI lays them out, made of the one that the tests compile with."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from flashvar_factory.toolchain import nvcc

ROOT = Path(__file__).parents[2]


def of_pypi(home: Path) -> Path:
    """An nvcc in `home`, whose libraries are in lib, where nvcc does not look by itself."""
    real = nvcc.find("auto", os.environ, ROOT).nvcc
    dry = subprocess.run([real, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True)
    (top,) = re.findall(r"^#\$ TOP=(.+)$", dry.stderr.decode(), re.MULTILINE)
    library = next(Path(top).resolve().glob("**/libcudart_static.a"))
    (home / "bin").mkdir(parents=True)
    (home / "lib").symlink_to(library.parent)
    return calling(real, home / "bin" / "nvcc")


def calling(real: Path, program: Path) -> Path:
    """A program at `program` that is `real`, under another name."""
    program.write_text(f'#!/bin/sh\nexec "{real}" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return program
