"""A build folder belongs to the compilers that filled it: with others it starts empty."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import toolkits
from checkout import small_project

Factory = Callable[..., "subprocess.CompletedProcess[str]"]

# One kernel, which compiles in a second.
KERNEL = ("sm_75", "dtype=fp32", "per_thread=1")
WHEEL = ("wheels", *KERNEL)
DEVELOPMENT = ("build", *KERNEL)
AFRESH = "starts empty"
COMPILED = "Building CUDA object"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the small project, in which nothing is built."""
    return small_project(tmp_path_factory.mktemp("other") / "vecadd")


def test_another_nvcc_and_back_again(
    factory: Factory, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One finds its libraries by itself, the other one is told where they are."""
    first = factory(tree, *WHEEL)
    assert first.returncode == 0, first.stdout
    assert AFRESH not in first.stdout
    again = factory(tree, *WHEEL)
    assert again.returncode == 0, again.stdout
    assert AFRESH not in again.stdout
    assert COMPILED not in again.stdout
    with monkeypatch.context() as patch:
        nvcc = toolkits.of_pypi(tmp_path / "toolkit")
        patch.setenv("CUDACXX", str(nvcc))
        other = factory(tree, *WHEEL)
    assert other.returncode == 0, other.stdout
    (said,) = [line for line in other.stdout.splitlines() if AFRESH in line]
    assert f"is {nvcc}" in said
    back = factory(tree, *WHEEL)
    assert back.returncode == 0, back.stdout
    assert f"nvcc was {nvcc}" in back.stdout


def test_a_toolkit_in_a_folder_with_a_space_and_an_upgraded_compiler(
    factory: Factory, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toolkit is laid out as on PyPI: the libraries in lib, where nvcc does not look by itself.

    Nothing in a command says that the C++ compiler was upgraded in its place, and no file of it is
    newer than what was compiled.
    """
    home = tree / "build" / "tool kit"
    monkeypatch.setenv("CUDACXX", str(toolkits.of_pypi(home)))
    real = Path(shutil.which(os.environ.get("CXX", "c++")) or "")
    compiler = toolkits.calling(real, tmp_path / "g++")
    monkeypatch.setenv("CXX", str(compiler))
    before = factory(tree, *DEVELOPMENT)
    assert before.returncode == 0, before.stdout
    commands = (tree / "build" / "compile_commands.json").read_text(encoding="utf-8")
    assert f"-L'{home / 'lib'}'" in commands
    script = compiler.read_text(encoding="utf-8")
    upgraded = 'case "$*" in --version) echo "g++ 99.1"; exit;; esac\n'
    compiler.write_text(script.replace("exec", f"{upgraded}exec"), encoding="utf-8")
    os.utime(compiler, (0, 0))
    done = factory(tree, *DEVELOPMENT)
    assert done.returncode == 0, done.stdout
    assert f"is {compiler} (g++ 99.1)" in done.stdout
    assert COMPILED in done.stdout
