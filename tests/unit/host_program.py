"""Runs what of the CUDA sources is plain C++ on the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCES = Path(__file__).parents[2] / "src" / "cuda"
_COMPILER = shutil.which("g++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(_COMPILER is None, reason="no C++ compiler")


def run(program: str, folder: Path) -> tuple[int, str]:
    """Compile a program against src/cuda, in `folder`; give its exit code and what it prints."""
    (folder / "cuda_runtime_api.h").touch()
    source, made = folder / "program.cc", folder / "program"
    source.write_text(program, encoding="utf-8")
    command = [str(_COMPILER), "-std=c++17", "-O1", f"-I{_SOURCES}", f"-I{folder}"]
    subprocess.run([*command, source, "-o", made], check=True)
    done = subprocess.run([made], capture_output=True, text=True)
    return done.returncode, done.stdout
