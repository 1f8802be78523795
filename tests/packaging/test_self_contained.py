"""A self-contained project builds where the checkout is not: its sdist, and a wheel of that."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flashvar.binaries import manifest
from flashvar_factory.build import development
from flashvar_factory.toolchain import nvcc

from .conftest import ROOT, Factory


@pytest.fixture(scope="module")
def made(factory: Factory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of sdist and wheel."""
    folder = tmp_path_factory.mktemp("self-contained")
    words = ("sm80", "op=causal_conv1d_update", "dtype=bf16")
    done = factory(ROOT, "project", *words, "--output", str(folder / "project"))
    assert done.returncode == 0, done.stdout
    environment = {**os.environ, "CUDACXX": str(nvcc.find("auto", os.environ, ROOT).nvcc)}
    scripts = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([scripts, environment["PATH"]])
    # What it requires is here, but for the toolkit, which comes from where this checkout has it.
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    command += ["--outdir", str(folder / "dist"), str(folder / "project")]
    built = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert built.returncode == 0, built.stdout[-5000:]
    return folder / "dist"


def test_sdist_and_wheel(made: Path) -> None:
    endings = sorted(path.name.rpartition("bf16")[2] for path in made.iterdir())
    assert len(endings) == 2
    assert endings[0].startswith("-py3-none-linux_")  # the repair step gives the final tag
    assert endings[1] == ".tar.gz"


def test_the_library_loads_and_says_its_revision(made: Path, tmp_path: Path) -> None:
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        names = archive.namelist()
    package = tmp_path / "flashvar_sm80"
    assert "loads: ABI" in development.check_loads(package)
    described = manifest.read(package / manifest.FILE_NAME)
    checkout = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    assert described.source.revision == (checkout.stdout.strip() or None)
    licenses = {Path(name).name for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "THIRD_PARTY_NOTICES.md"}
    assert [name for name in names if name.endswith(".cdx.json")]
