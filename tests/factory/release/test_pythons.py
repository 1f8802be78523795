"""The Pythons that wheels are installed into: named, or found; there has to be one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from flashvar.errors import ConfigurationError
from flashvar_factory.cli import target_pythons
from flashvar_factory.errors import SmokeError
from flashvar_factory.release import pythons


def read(*words: str) -> tuple[pythons.Python, ...]:
    parser = argparse.ArgumentParser()
    target_pythons.add_argument(parser)
    return target_pythons.read(parser.parse_args(words))


def test_those_that_are_named() -> None:
    (found,) = read("--python", sys.executable)
    assert found.version == sys.version_info[:2]


def test_one_of_each_version_otherwise() -> None:
    found = read()
    assert sys.version_info[:2] in {one.version for one in found}
    assert len({one.tag for one in found}) == len(found)


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a Python 3\.10 or newer .* found none"):
        read("--python", str(tmp_path / "python"))


def test_there_has_to_be_one() -> None:
    with pytest.raises(SmokeError, match="found none; install one"):
        pythons.require(())
