"""Which nvcc is taken, from machines made of folders and scripts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import loaded_noxfile
import pytest

from flashvar_factory.errors import ToolchainError
from flashvar_factory.toolchain import driver, nvcc

ROOT = Path(__file__).parents[3]


def fake_nvcc(home: Path, version: str | None) -> Path:
    compiler = home / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    release = ".".join((version or "").split(".")[:2])
    said = f"Cuda compilation tools, release {release}, V{version}" if version else "broken"
    compiler.write_text(f"#!/bin/sh\necho '{said}'\n", encoding="utf-8")
    compiler.chmod(0o755)
    return compiler


@pytest.fixture(autouse=True)
def _machine_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the usual folder nor sys.path offers the nvcc of the machine that runs the tests."""
    monkeypatch.setattr(nvcc, "USUAL_FOLDER", tmp_path / "no-such-folder")
    monkeypatch.setattr("sys.path", [])


def test_path_comes_before_cuda_home(tmp_path: Path) -> None:
    on_path = fake_nvcc(tmp_path / "a", "13.0.88")
    fake_nvcc(tmp_path / "b", "13.1.2")
    environ = {"PATH": str(on_path.parent), "CUDA_HOME": str(tmp_path / "b")}
    found = nvcc.find("auto", environ, tmp_path)
    assert (found.nvcc, found.version, found.origin) == (on_path, "13.0.88", "PATH")


def test_too_old_on_path_is_passed_over(tmp_path: Path) -> None:
    old = fake_nvcc(tmp_path / "old", "12.9.86")
    new = fake_nvcc(tmp_path / "new", "13.0.88")
    environ = {"PATH": str(old.parent), "CUDA_PATH": str(tmp_path / "new")}
    assert nvcc.find("auto", environ, tmp_path).nvcc == new


@pytest.mark.parametrize("version", ["12.8.93", "12.9.86"])
def test_cuda_12_serves_when_named(tmp_path: Path, version: str) -> None:
    named = fake_nvcc(tmp_path / "named", version)
    environ = {"CUDACXX": str(named), "PATH": ""}
    assert nvcc.find("auto", environ, tmp_path).version == version


@pytest.mark.parametrize("version", ["12.6.85", None], ids=["too old", "broken"])
def test_named_and_unfit_is_refused_not_passed_over(tmp_path: Path, version: str | None) -> None:
    named = fake_nvcc(tmp_path / "named", version)
    fine = fake_nvcc(tmp_path / "fine", "13.0.88")
    environ = {"CUDACXX": str(named), "PATH": str(fine.parent)}
    with pytest.raises(ToolchainError) as caught:
        nvcc.find("auto", environ, tmp_path)
    assert str(named) in str(caught.value)
    assert (version or "no working nvcc") in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_HOME", "PATH"])
def test_a_relative_path_is_of_this_folder(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fake_nvcc(tmp_path / "other", "13.1.2")
    own = fake_nvcc(tmp_path / "own", "13.0.88")
    monkeypatch.chdir(own.parent if variable == "CUDACXX" else tmp_path)
    named = {"CUDACXX": "./nvcc", "CUDA_HOME": "own", "PATH": "own/bin"}[variable]
    environ = {"PATH": str(other.parent) if variable == "CUDACXX" else "", variable: named}
    assert nvcc.find("auto", environ, tmp_path).nvcc == own


@pytest.mark.parametrize("named", ["./nvcc", "nvcd", "~/nvcc"])
def test_a_name_of_nothing_is_no_other_compiler(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = fake_nvcc(tmp_path / "fine", "13.0.88")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(fine.parent), prepend=":")
    with pytest.raises(ToolchainError, match=r"CUDACXX: .*: no working nvcc"):
        nvcc.find("auto", {"CUDACXX": named, "PATH": str(fine.parent)}, tmp_path)


def test_a_program_that_prints_no_text_is_no_nvcc(tmp_path: Path) -> None:
    named = fake_nvcc(tmp_path / "named", None)
    named.write_text("#!/bin/sh\nprintf '\\377'\n", encoding="utf-8")
    with pytest.raises(ToolchainError, match="no working nvcc"):
        nvcc.find("auto", {"CUDACXX": str(named), "PATH": ""}, tmp_path)


def test_pypi_is_last_and_brings_its_library_folder(tmp_path: Path) -> None:
    home = tmp_path / "build" / "toolkit" / "nvidia" / "cu13"
    compiler = fake_nvcc(home, "13.0.88")
    (home / "lib").mkdir()
    (home / "lib" / "libcudart_static.a").touch()
    found = nvcc.find("auto", {"PATH": ""}, tmp_path)
    assert (found.nvcc, found.library_dir, found.origin) == (compiler, home / "lib", "PyPI")
    on_path = fake_nvcc(tmp_path / "a", "13.2.1")
    environ = {"PATH": str(on_path.parent)}
    assert nvcc.find("auto", environ, tmp_path).nvcc == on_path
    assert nvcc.find("pypi", environ, tmp_path).nvcc == compiler


def test_system_never_takes_pypi(tmp_path: Path) -> None:
    fake_nvcc(tmp_path / "build" / "toolkit" / "nvidia" / "cu13", "13.0.88")
    with pytest.raises(ToolchainError, match=r"expected nvcc 13\.0 or newer.*nothing|no working"):
        nvcc.find("system", {"PATH": ""}, tmp_path)


def test_a_toolkit_with_lib64_needs_no_library_folder(tmp_path: Path) -> None:
    compiler = fake_nvcc(tmp_path / "cuda", "13.0.88")
    (tmp_path / "cuda" / "lib64").mkdir()
    environ = {"PATH": str(compiler.parent)}
    assert nvcc.find("auto", environ, tmp_path).library_dir is None


DRIVERS = {
    "13.0 sass": ((13, 0), ("sass",), (13, 0), "580"),
    "13.1 sass": ((13, 1), ("sass",), (13, 0), "580"),
    "13.1 with ptx": ((13, 1), ("sass", "ptx"), (13, 1), "590"),
    "12.9 sass": ((12, 9), ("sass",), (12, 0), "525"),
    "12.9 with ptx": ((12, 9), ("sass", "ptx"), (12, 9), "575"),
}


@pytest.mark.parametrize(("toolkit", "kinds", "cuda", "display"), DRIVERS.values(), ids=DRIVERS)
def test_minimum_driver(
    toolkit: tuple[int, int], kinds: tuple[str, ...], cuda: tuple[int, int], display: str
) -> None:
    found = driver.minimum(toolkit, kinds)
    assert (found.cuda, found.display) == (cuda, display)


class Session:
    """What noxfile.py asks of nox, with an nvcc for what is installed."""

    posargs = ("toolkit=pypi",)

    def __init__(self) -> None:
        self.installed: list[str] = []

    def log(self, text: str) -> None:
        """Nobody reads it."""

    def install(self, *words: str, env: object) -> None:
        target, folder, *requirements = words
        assert target == "--target"
        assert not Path(folder).exists()  # pip leaves there what is there
        fake_nvcc(Path(folder, "nvidia", "cu13"), "13.0.88")
        self.installed += requirements


@pytest.fixture(scope="module")
def noxfile() -> Any:
    return loaded_noxfile.load(ROOT / "noxfile.py")


def test_a_toolkit_of_other_pins_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noxfile: Any
) -> None:
    monkeypatch.setattr(noxfile, "ROOT", tmp_path)

    def installed(pins: str) -> list[str]:
        groups = {"dependency-groups": {nvcc.GROUP: [pins]}}
        monkeypatch.setattr(noxfile, "PYPROJECT", groups)
        session = Session()
        noxfile.install_toolkit(session)
        return session.installed

    assert installed("cuda-toolkit==13.0.2") == ["cuda-toolkit==13.0.2"]
    assert installed("cuda-toolkit==13.0.2") == []
    assert installed("cuda-toolkit==13.1.0") == ["cuda-toolkit==13.1.0"]
    assert installed("cuda-toolkit==13.1.0") == []
    shutil.rmtree(tmp_path / "build")
    fake_nvcc(tmp_path / "build" / "toolkit" / "nvidia" / "cu13", "13.0.88")
    assert installed("cuda-toolkit==13.1.0") == ["cuda-toolkit==13.1.0"]  # who knows what that was
    lock = tmp_path / "locks" / f"{nvcc.GROUP}.txt"
    lock.parent.mkdir()
    lock.write_text("cuda-toolkit==13.1.0 --hash=sha256:0", encoding="utf-8")
    assert installed("") == ["--require-hashes", "--requirement", str(lock)]
    assert installed("") == []
