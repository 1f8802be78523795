"""Wheels as a repository of Hugging Face's kernels, loaded by that package from a folder."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import fake_wheels
import pytest
from fake_artifacts import Wheel

from flashvar.errors import ConfigurationError
from flashvar_factory.cli import main
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive
from flashvar_factory.release import hf_kernel

INIT = """\
from pathlib import Path
__version__ = "0.1.0"
__all__ = ["__version__", "binaries"]
def binaries():
    return sorted(path.name for path in Path(__file__).parent.glob("_binaries/*"))
"""
MORE = "__all__ = ['attend']\ndef attend():\n    return 'served'\n"
# As `kernels` imports it: under a name of its own, from a file.
IMPORT = """
import importlib.util, sys
from pathlib import Path
folder = Path(sys.argv[1], "build", sys.argv[2])
spec = importlib.util.spec_from_file_location("_kernel", folder / "__init__.py")
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
print(kernel.binaries(), kernel.attend())
"""
LOAD = """
import sys
from pathlib import Path
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata
for name in ("torch-cuda", "torch-cpu"):
    folder = Path(sys.argv[1], "build", name)
    found = Digest.hash_variant(DigestAlgorithm.SHA256, folder)
    Metadata.read_from_file(folder / "metadata.json").digest.validate(found)
kernel = get_local_kernel(Path(sys.argv[1]))
print(kernel.__name__, kernel.attend())
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """The project's own wheel and a binary one."""
    folder = tmp_path / "dist"
    files = {"flashvar/__init__.py": INIT.encode(), "flashvar/more.py": MORE.encode()}
    plain = fake_wheels.put(folder, "flashvar", "0.1.0", "py3-none-any", files)
    contents = archive.read(plain)
    contents["flashvar-0.1.0.dist-info/METADATA"] = (
        b"Metadata-Version: 2.4\nName: flashvar\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\n"
    )
    archive.write(plain, contents, "flashvar-0.1.0.dist-info")
    Wheel().write(folder)
    # Holds no binary, and is none of the kernel.
    fake_wheels.put(folder, "flashvar_factory", "0.1.0", "py3-none-any", {})
    return folder


@pytest.fixture
def made(wheels: Path, tmp_path: Path) -> Path:
    modules = ["flashvar", "flashvar.more"]
    hf_kernel.write(wheels, tmp_path / "kernel", "flashvar", modules=modules, version=3)
    return tmp_path / "kernel"


def run(
    program: str, *arguments: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-c", program, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize(("build", "binaries"), [("torch-cuda", "['sm_80']"), ("torch-cpu", "[]")])
def test_a_build_is_the_package_with_its_binaries(build: str, binaries: str, made: Path) -> None:
    done = run(IMPORT, str(made), build)
    assert done.stdout == f"{binaries} served\n", done.stderr


@pytest.mark.skipif(find_spec("kernels") is None, reason="the package kernels is not installed")
def test_the_real_package_loads_it(made: Path, python: str) -> None:
    done = run(LOAD, str(made), python=python)
    assert done.stdout.startswith("_flashvar_c"), done.stderr
    assert done.stdout.endswith(" served\n")


def test_the_metadata_names_every_file(made: Path, wheels: Path) -> None:
    folder = made / "build" / "torch-cuda"
    said = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    assert (said["version"], said["license"]) == (3, "Apache-2.0")
    assert said["backend"] == {"type": "cuda"}
    found = {
        str(path.relative_to(folder)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest())
        for path in folder.rglob("*")
        if path.is_file() and path.name != "metadata.json"
    }
    assert said["digest"]["files"] == {name: one.decode() for name, one in found.items()}
    (library,) = folder.glob("flashvar/_binaries/sm_80/*.so")
    (wheel,) = wheels.glob("flashvar_sm80-*.whl")
    assert library.read_bytes() == archive.read(wheel)[f"flashvar_sm80/{library.name}"]


def test_another_version_is_not_mixed_with_it(made: Path, tmp_path: Path) -> None:
    (tmp_path / "flashvar.py").write_text("__version__ = '9'\n", encoding="utf-8")
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flashvar\n"
    done = run(first + IMPORT, str(made), "torch-cpu")
    assert done.returncode == 1
    assert "ImportError: expected flashvar 0.1.0, found 9" in done.stderr


def test_what_an_earlier_call_left_is_gone(made: Path, wheels: Path) -> None:
    stale = made / "build" / "torch-cuda" / "stale.py"
    stale.touch()
    hf_kernel.write(wheels, made, "flashvar", modules=["flashvar"], version=3)
    assert not stale.exists()


@pytest.mark.parametrize("said", [None, '{"id": "_other_cuda_0"}', '{"id": 1}', "[]", "no JSON"])
def test_a_build_of_others_stays(said: str | None, wheels: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "kernel" / "build" / "torch-cpu"
    theirs.mkdir(parents=True)
    (theirs / "mine.py").touch()
    if said is not None:
        (theirs / "metadata.json").write_text(said, encoding="utf-8")
    with pytest.raises(PackagingError, match="torch-cpu: expected an earlier build of flashvar"):
        hf_kernel.write(wheels, tmp_path / "kernel", "flashvar", modules=["flashvar"], version=1)
    assert (theirs / "mine.py").exists()
    assert [one.name for one in theirs.parent.iterdir()] == ["torch-cpu"]


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_link_to_a_build_stays(target: str, made: Path, wheels: Path) -> None:
    """It may lead to the only copy of a build."""
    folder = made / "build" / "torch-cpu"
    folder.rename(made / "elsewhere")
    folder.symlink_to(made / target)
    before = sorted(made.rglob("*"))
    with pytest.raises(PackagingError, match="torch-cpu: expected an earlier build of flashvar"):
        hf_kernel.write(wheels, made, "flashvar", modules=["flashvar"], version=3)
    assert sorted(made.rglob("*")) == before


def test_an_earlier_build_stays_until_the_new_one_is_whole(
    made: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    before = sorted((made / "build").rglob("*"))
    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        hf_kernel.write(wheels, made, "flashvar", modules=["flashvar"], version=3)
    assert sorted((made / "build").rglob("*")) == before


@pytest.mark.parametrize("version", ["0", "-3"])
def test_what_names_no_branch_is_refused(
    version: str, wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[3]
    words = ["--wheels", str(wheels), "--output", str(tmp_path / "kernel")]
    words += ["--kernel-version", version]
    assert main(["--root", str(root), "hf-kernel", *words]) == 2
    said = f"expected an integer above 0, found {version}: name 1 for the branch v1"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "kernel").exists()


def test_an_unknown_module_is_refused(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--module flashvar\.absent"):
        hf_kernel.write(
            wheels, tmp_path / "kernel", "flashvar", modules=["flashvar.absent"], version=1
        )
    assert not (tmp_path / "kernel").exists()


def test_without_binaries_there_is_no_kernel(wheels: Path, tmp_path: Path) -> None:
    for path in wheels.glob("flashvar_sm80-*"):
        path.unlink()
    with pytest.raises(PackagingError, match="expected wheels of binaries"):
        hf_kernel.write(wheels, tmp_path / "kernel", "flashvar", modules=["flashvar"], version=1)


def test_the_command_says_how_to_load_it(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[3]
    words = ["--wheels", str(wheels), "--output", str(tmp_path / "kernel")]
    assert main(["--root", str(root), "hf-kernel", *words]) == 0
    printed = capsys.readouterr().out
    assert f'get_local_kernel(Path("{tmp_path / "kernel"}"))' in printed
