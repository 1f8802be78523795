"""A folder of CMake's is kept for the compilers that filled it, and emptied for all others."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashvar_factory.toolchain import compiled_by
from flashvar_factory.toolchain.cross import Cross
from flashvar_factory.toolchain.nvcc import Toolchain

NVCC = Toolchain(Path("/cuda/bin/nvcc"), "13.0.88", None, "PATH")
GRACE = Cross("aarch64", Path("/usr/bin/aarch64-g++"), Path("/headers"), Path("/libraries"))


def compiler(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{name} {version}'\necho license\n", encoding="utf-8")
    program.chmod(0o755)
    return program


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A machine with two compilers."""
    for name in ("c++", "gcc"):
        compiler(tmp_path / "bin", name, "12.2")
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that a build has filled."""
    made = tmp_path / "plan" / "cmake"
    made.mkdir(parents=True)
    (made / "CMakeCache.txt").touch()
    return made


def filled(folder: Path) -> bool:
    return (folder / "CMakeCache.txt").is_file()


def test_facts_of_a_machine(environ: dict[str, str], tmp_path: Path) -> None:
    assert compiled_by.facts(NVCC, environ) == {
        "nvcc": "/cuda/bin/nvcc (13.0.88)",
        "C++": f"{tmp_path}/bin/c++ (c++ 12.2)",
        "nvcc's C++": f"{tmp_path}/bin/gcc (gcc 12.2)",
    }


@pytest.mark.parametrize("given", ['c++ "-O2', "odd"])
def test_what_cannot_be_asked_is_a_fact_too(
    given: str, environ: dict[str, str], tmp_path: Path
) -> None:
    odd = compiler(tmp_path / "bin", "odd", "")
    odd.write_text("#!/bin/sh\nprintf '\\377'\n", encoding="utf-8")
    found = compiled_by.facts(NVCC, {**environ, "CXX": given, "CUDAHOSTCXX": given})
    assert all(given.partition(" ")[0] in found[name] for name in ("C++", "nvcc's C++"))


def upgrade(environ: dict[str, str], tmp_path: Path) -> None:
    compiler(tmp_path / "bin", "c++", "13.1")


def name_another(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CXX"] = str(compiler(tmp_path / "other", "clang++", "19"))


def name_another_for_nvcc(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CUDAHOSTCXX"] = str(compiler(tmp_path / "other", "g++-12", "12"))


def put_another_first(environ: dict[str, str], tmp_path: Path) -> None:
    compiler(tmp_path / "first", "c++", "12.2")
    environ["PATH"] = f"{tmp_path / 'first'}:{environ['PATH']}"


def give_a_flag(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CXXFLAGS"] = "-O1"


def give_nvcc_a_flag(environ: dict[str, str], tmp_path: Path) -> None:
    """It reads the variable at each call, so that no command of ninja's has it."""
    environ["NVCC_APPEND_FLAGS"] = "-G"


def name_headers(environ: dict[str, str], tmp_path: Path) -> None:
    environ["CPATH"] = str(tmp_path)


def remove_all(environ: dict[str, str], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "bin")
    environ["PATH"] = ""


CHANGES = {
    "upgraded in its place": (upgrade, "C++ was", "(c++ 13.1)"),
    "CXX": (name_another, "C++ was", "clang++ 19"),
    "CUDAHOSTCXX": (name_another_for_nvcc, "nvcc's C++ was", "g++-12 12"),
    "first on PATH": (put_another_first, "C++ was", "first/c++"),
    "flag": (give_a_flag, "CXXFLAGS was not set", "is -O1"),
    "flag of nvcc": (give_nvcc_a_flag, "NVCC_APPEND_FLAGS was not set", "is -G"),
    "headers": (name_headers, "CPATH was not set", "is /"),
    "removed": (remove_all, "C++ was", "is c++"),
}


@pytest.mark.parametrize(("change", "was", "now"), CHANGES.values(), ids=CHANGES)
def test_changes_of_a_machine(
    change: object,
    was: str,
    now: str,
    environ: dict[str, str],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert callable(change)
    compiled_by.claim(folder, compiled_by.facts(NVCC, environ))
    (folder / "CMakeCache.txt").parent.mkdir(exist_ok=True)
    (folder / "CMakeCache.txt").touch()
    capsys.readouterr()
    change(environ, tmp_path)
    compiled_by.claim(folder, compiled_by.facts(NVCC, environ))
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{folder}: starts empty: {was}")
    assert now in said
    assert not filled(folder)


@pytest.mark.parametrize(
    "other",
    [
        replace(NVCC, nvcc=Path("/other/nvcc")),
        replace(NVCC, version="13.1.2"),
        replace(NVCC, cross=GRACE),
    ],
    ids=["another nvcc", "upgraded nvcc", "another processor"],
)
def test_changes_of_the_toolchain(other: Toolchain, environ: dict[str, str]) -> None:
    assert compiled_by.facts(other, environ) != compiled_by.facts(NVCC, environ)


def test_the_same_again_keeps_the_folder(
    environ: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plan" / "cmake"
    now = compiled_by.facts(NVCC, environ)
    compiled_by.claim(folder, now)  # nothing is there yet
    folder.mkdir()
    (folder / "CMakeCache.txt").touch()
    compiled_by.claim(folder, now)
    assert filled(folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("record", [None, "", "{"], ids=["none", "empty", "half"])
def test_a_folder_of_nobody_begins_afresh(
    record: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if record is not None:
        folder.with_name(compiled_by.FILE).write_text(record, encoding="utf-8")
    compiled_by.claim(folder, {"nvcc": "a"})
    assert "nothing records what compiled it" in capsys.readouterr().out
    assert not filled(folder)


def test_an_interrupted_removal_is_trusted_by_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder)
    compiled_by.claim(folder, {"nvcc": "a"})
    folder.mkdir()

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiled_by.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiled_by.claim(folder, {"nvcc": "b"})
    (folder / "half").touch()
    compiled_by.claim(folder, {"nvcc": "a"})
    assert not folder.exists()
