"""What `flashvar install` takes for installed already."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import fakes
import pytest
from installed import put_binary, put_wheel

from flashvar._version import __version__
from flashvar.cli import install
from flashvar.errors import InstallError
from flashvar.installing import wheel_requirements
from flashvar.installing.wheel_requirements import WheelRequirement
from flashvar.machine.system import platform_tag

MANIFEST = fakes.manifest("89", version=__version__)


@pytest.fixture
def requirement(
    fresh_registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> WheelRequirement:
    """A flashvar with one extra, in an environment with nothing else."""
    line = f"{MANIFEST.distribution}=={__version__}; extra == 'sm89'"
    known = wheel_requirements.read([line], platform_tag())
    monkeypatch.setattr(wheel_requirements, "of_installed", lambda platform: known)
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "named"))
    return known[0]


@pytest.mark.usefixtures("requirement")
def test_an_installed_binary_behind_a_named_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_wheel(tmp_path / "site", MANIFEST, __version__)
    put_binary(tmp_path / "named", MANIFEST)
    chosen = Namespace(arch="sm89", source=None, dry_run=False)
    assert install.run(chosen) == 0
    expected = f"installed already: flashvar-sm89=={__version__}, for a GPU (8.9)\n"
    assert capsys.readouterr().out == expected


def test_a_named_binary_is_not_what_was_installed(
    requirement: WheelRequirement, tmp_path: Path
) -> None:
    """An installer that put it into another environment is not hidden by it."""
    put_binary(tmp_path / "named", MANIFEST)
    with pytest.raises(InstallError, match="after it was installed, found none"):
        install._check_found([requirement])
    put_wheel(tmp_path / "site", MANIFEST, __version__)
    install._check_found([requirement])
