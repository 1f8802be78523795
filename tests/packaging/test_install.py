"""Wheels are installed as users do, into fresh environments, and found there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from flashvar_factory import index

TORCH = """\
Metadata-Version: 2.1
Name: torch
Version: 2.13.0
"""


@pytest.fixture(scope="module")
def links(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's wheels, and an empty one that satisfies `torch` without a download."""
    folder = tmp_path_factory.mktemp("links")
    for wheel in dist.glob("*.whl"):
        (folder / wheel.name).symlink_to(wheel)
    info = "torch-2.13.0.dist-info"
    with zipfile.ZipFile(folder / "torch-2.13.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", TORCH)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


def fresh_environment(folder: Path) -> Path:
    """A new virtual environment without pip, which takes seconds to put into one; its Python."""
    venv.create(folder)
    return folder / "bin" / "python"


def pip(python: Path) -> list[str]:
    """The pip of this environment, at work in that of a Python."""
    return [sys.executable, "-m", "pip", "--python", str(python), "--isolated"]


def pip_install(python: Path, *arguments: str) -> None:
    command = [*pip(python), "install", "--no-compile", "--quiet", *arguments]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environ["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def ask(*command: str, pythonpath: str = "") -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FLASHVAR_")}
    environ |= {"PYTHONPATH": pythonpath}
    return subprocess.run(command, env=environ, capture_output=True, text=True).stdout


@pytest.mark.parametrize("way", ["index", "find-links"])
def test_extra_brings_the_binary(way: str, links: Path, tmp_path: Path) -> None:
    python = fresh_environment(tmp_path / "env")
    if way == "index":
        index.write(links, tmp_path / "site")
        source = ["--index-url", (tmp_path / "site").as_uri() + "/"]
    else:
        source = ["--no-index", "--find-links", str(links)]
    pip_install(python, *source, "flashvar[sm89]")

    listed = json.loads(ask(*pip(python), "list", "--format=json"))
    names = {row["name"].replace("_", "-") for row in listed}
    assert {"flashvar", "flashvar-sm89", "torch"} <= names
    assert "flashvar-sm80" not in names
    # With the real torch of this test run in place of the empty one, doctor sees the binary.
    real_torch = sysconfig.get_path("purelib")
    doctor = ask(str(python), "-m", "flashvar", "doctor", "--json", pythonpath=real_torch)
    assert "flashvar_sm89" in doctor
    assert str(tmp_path) in doctor
    json.loads(doctor)


def test_corrupted_file_is_refused_by_its_hash(links: Path, tmp_path: Path) -> None:
    index.write(links, tmp_path / "site")
    (wheel,) = (tmp_path / "site" / "flashvar-sm89").glob("*.whl")
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    python = fresh_environment(tmp_path / "env")
    with pytest.raises(AssertionError, match="DO NOT MATCH THE HASHES"):
        pip_install(python, "--index-url", (tmp_path / "site").as_uri() + "/", "flashvar[sm89]")
