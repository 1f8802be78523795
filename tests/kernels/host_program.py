"""Runs what of the CUDA sources is plain C++ on the host, kernels without inline PTX too.

Headers of `host_cuda` stand for the CUDA runtime and for instructions that the host lacks.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "cuda"
_STAND_INS = Path(__file__).with_name("host_cuda")
_COMPILER = shutil.which("g++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(_COMPILER is None, reason="no C++ compiler")


def run(
    program: str,
    folder: Path,
    headers: Mapping[str, str] | None = None,
    *options: str,
    arguments: Sequence[str] = (),
) -> tuple[int, str]:
    """Compile a program against src/cuda, in `folder`; give its exit code and what it prints.

    `headers` are files that sources of src/cuda include: that a build generates, or instead of
    their own. `options`: of the compiler; `arguments`: of the program.
    """
    return answer(executable(program, folder, headers, *options), *arguments)


def executable(
    program: str, folder: Path, headers: Mapping[str, str] | None = None, *options: str
) -> Path:
    """The compiled program, for tests that run it more than once."""
    return _compile(program, folder, headers, "program", *options)


def answer(made: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of a compiled program, and what it prints."""
    done = subprocess.run([made, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout


def library(
    program: str, folder: Path, headers: Mapping[str, str] | None = None, *options: str
) -> ctypes.CDLL:
    """The same as a library in this process."""
    made = _compile(program, folder, headers, "program.so", "-shared", "-fPIC", *options)
    return ctypes.CDLL(str(made))


def _compile(
    program: str, folder: Path, headers: Mapping[str, str] | None, name: str, *options: str
) -> Path:
    for path, text in (headers or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    source, made = folder / "program.cc", folder / name
    source.write_text(program, encoding="utf-8")
    includes = [f"-I{path}" for path in (_STAND_INS, folder, SOURCES)]
    # Most of the time goes into compilation, unless `options` say otherwise. The threads of a block
    # jump from stack to stack, which a fortified longjmp takes for a fault.
    command = [str(_COMPILER), "-std=c++17", "-O0", "-U_FORTIFY_SOURCE", *includes, *options]
    subprocess.run([*command, source, "-o", made], check=True)
    return made
