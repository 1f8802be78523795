"""What installers do with the extras of the project's wheel, under the names that people type."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from checkout import alone

from flashvar_factory.build import wheel
from flashvar_factory.config import schema, version

ROOT = Path(__file__).parents[2]
CONFIG = schema.read(ROOT / "variants.toml")
VERSION = version.read(CONFIG, ROOT)
SPELLINGS = ("sm89", "sm_89", "SM-89")
INSTALLERS = {
    "pip": [sys.executable, "-m", "pip", "--isolated", "install", "--no-compile"],
    "uv": [sys.executable, "-m", "uv", "pip", "install", "--no-config"],
}


def stand_in(folder: Path, name: str, release: str) -> None:
    """A wheel of this name, with nothing in it."""
    info = f"{name.replace('-', '_')}-{release}.dist-info"
    with zipfile.ZipFile(folder / f"{info[:-10]}-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's own wheel, and stand-ins for what it asks for."""
    folder = tmp_path_factory.mktemp("links")
    with alone():
        wheel.pure(CONFIG, root=ROOT, output=folder)
    stand_in(folder, "torch", "2.13.0")
    for target in CONFIG.targets.values():
        stand_in(folder, target.distribution, VERSION)
    return folder


def installed(installer: str, asked: str, links: Path, target: Path) -> set[str]:
    """The distributions that a command brings; it ends with 0."""
    _ = bring(installer, asked, links, target)
    return {path.name.split("-")[0] for path in target.glob("*.dist-info")}


def bring(installer: str, asked: str, links: Path, target: Path) -> str:
    """Install into a folder; what the command complains of."""
    where = ["--target", str(target), "--no-index", "--find-links", str(links)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [*INSTALLERS[installer], *where, asked], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("extra", SPELLINGS)
def test_one_architecture(extra: str, links: Path, tmp_path: Path) -> None:
    found = installed("uv", f"flashvar[{extra}]", links, tmp_path)
    assert found == {"flashvar", "flashvar_sm89", "torch"}


def test_pip_knows_every_spelling(links: Path, tmp_path: Path) -> None:
    """All at once, for it takes seconds: one that it did not know, it would complain of."""
    asked = f"flashvar[{','.join(SPELLINGS)}]"
    assert "does not provide the extra" not in bring("pip", asked, links, tmp_path / "all")
    found = {path.name.split("-")[0] for path in (tmp_path / "all").glob("*.dist-info")}
    assert found == {"flashvar", "flashvar_sm89", "torch"}
    # Which it says in these words.
    asked = "flashvar[sm89,sm_75]"
    assert "does not provide the extra" in bring("pip", asked, links, tmp_path / "unknown")


@pytest.mark.parametrize("installer", INSTALLERS)
@pytest.mark.parametrize("extra", ["all", "cuda"])
def test_all_of_them(installer: str, extra: str, links: Path, tmp_path: Path) -> None:
    found = installed(installer, f"flashvar[{extra}]", links, tmp_path)
    binaries = {
        target.distribution.replace("-", "_")
        for target in CONFIG.targets.values()
        if target.toolkit is None and platform.machine() in target.platforms
    }
    assert found == {"flashvar", "torch", *binaries}


@pytest.mark.parametrize("installer", INSTALLERS)
@pytest.mark.parametrize(
    ("extra", "stem"),
    [("sm89-cu12", "flashvar_sm89_cu12"), ("sm121", "flashvar_sm120"), ("sm103", "flashvar_sm100")],
)
def test_extras_of_other_drivers_and_of_shared_wheels(
    installer: str, extra: str, stem: str, links: Path, tmp_path: Path
) -> None:
    assert installed(installer, f"flashvar[{extra}]", links, tmp_path) == {
        "flashvar",
        "torch",
        stem,
    }


@pytest.mark.parametrize("installer", INSTALLERS)
def test_doctor_says_what_became_of_other_extras(
    installer: str, links: Path, tmp_path: Path
) -> None:
    found = installed(installer, "flashvar[sm75,8.9]", links, tmp_path)
    assert found == {"flashvar", "torch"}
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{sysconfig.get_path('purelib')}"}
    doctor = subprocess.run(
        [sys.executable, "-m", "flashvar", "doctor"], env=environ, capture_output=True, text=True
    )
    assert "pip ignores unknown extras; flashvar has the extras sm80" in doctor.stdout
