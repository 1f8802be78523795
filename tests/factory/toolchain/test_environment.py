"""Environments of nox: what was refused or interrupted is taken for nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flashvar_factory.errors import ToolchainError
from flashvar_factory.toolchain import environment

ROOT = Path(__file__).parents[3]


def made(folder: Path, pins: str | None) -> Path:
    """An environment with a Python, and with a stamp where pins are installed."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    if pins is not None:
        (folder / environment.STAMP).write_text(pins, encoding="utf-8")
    return folder


def test_whole_is_what_was_installed_to_its_end(tmp_path: Path) -> None:
    folder = made(tmp_path / "env", "torch")
    assert environment.holds(folder, "torch")
    assert not environment.holds(folder, "torch==1")
    assert environment.python(folder, "build-dev") == folder / "bin" / "python"
    environment.remove_unless_whole(folder)
    assert folder.is_dir()


def test_what_is_not_whole_is_named_with_its_session(tmp_path: Path) -> None:
    folder = made(tmp_path / "env", None)
    with pytest.raises(ToolchainError, match=r"found an incomplete one; run `nox -s build-dev"):
        environment.python(folder, "build-dev")
    environment.remove_unless_whole(folder)
    assert not folder.exists()
    with pytest.raises(ToolchainError, match=r"found none; run `nox -s build-dev`"):
        environment.python(folder, "build-dev")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as they are, and no environment."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("noxfile.py", "pyproject.toml", "variants.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("src", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def nox(python: str, clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "nox", "-s", *words],
        cwd=clone,
        env={name: value for name, value in os.environ.items() if name != "CUDACXX"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("build-dev", "--", "hdim=65"), "did you mean '72'"),
        (("build-dev", "--", "platform=riscv64"), "platform=riscv64"),
        (("build-dev", "--", "platform=aarch64"), "development builds run where they are made"),
        (("wheels", "--", "hdmi=64"), "unknown key 'hdmi'"),
        (("wheels", "--", "sm_80", "platform=aarch64"), "platform=aarch64"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refused_words_leave_no_environment(
    words: tuple[str, ...], said: str, clone: Path, python_with_nox: str
) -> None:
    done = nox(python_with_nox, clone, *words)
    assert done.returncode != 0
    assert said in done.stdout
    assert not (clone / ".nox" / words[0]).exists()
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("words", [("gpu",), ("bench", "--", "host")], ids=["gpu", "bench"])
@pytest.mark.parametrize("there", [False, True], ids=["no environment", "half an environment"])
def test_what_runs_in_the_environment_says_what_makes_it(
    words: tuple[str, ...], there: bool, clone: Path, python_with_nox: str
) -> None:
    folder = clone / ".nox" / "build-dev"
    shutil.rmtree(folder, ignore_errors=True)
    if there:
        made(folder, None)
    done = nox(python_with_nox, clone, *words)
    assert done.returncode != 0
    assert f"expected the environment {folder}" in done.stdout
    assert "run `nox -s build-dev`" in done.stdout
    assert "Traceback" not in done.stdout
