"""A machine without a C++ compiler hears of it at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashvar_factory.errors import ToolchainError
from flashvar_factory.toolchain import host_compiler


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, the only one that is looked at."""
    monkeypatch.setattr(host_compiler, "_USUAL", ())
    return tmp_path


def put(folder: Path, name: str) -> None:
    (folder / name).touch(mode=0o755)


@pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
def test_a_compiler_on_path_will_do(name: str, nothing: Path) -> None:
    with pytest.raises(ToolchainError, match="found none on PATH: apt-get install"):
        host_compiler.require({"PATH": str(nothing)})
    put(nothing, name)
    host_compiler.require({"PATH": str(nothing)})


@pytest.mark.parametrize("named", ["/absent/g++", "absent", "absent -m64", " "])
def test_what_is_named_must_be_there(named: str, nothing: Path) -> None:
    put(nothing, "g++")
    with pytest.raises(ToolchainError, match=re.escape(f"found CXX={named}, which is not there")):
        host_compiler.require({"PATH": str(nothing), "CXX": named})


def test_a_quotation_that_does_not_end_is_said(nothing: Path) -> None:
    put(nothing, "g++")
    with pytest.raises(ToolchainError, match=r"CXX: .*\(No closing quotation\): correct CXX"):
        host_compiler.require({"PATH": str(nothing), "CXX": 'g++ "-O2'})


def test_a_compiler_is_named_with_its_options(nothing: Path) -> None:
    put(nothing, "mine")
    host_compiler.require({"PATH": str(nothing), "CXX": "mine -m64"})
    host_compiler.require({"PATH": "", "CXX": str(nothing / "mine")})
