"""A project of other kernels: words, names and generated code have nothing of attention."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import loaded_noxfile
import pytest
from packaging.requirements import Requirement

from flashvar._version import __version__
from flashvar.binaries.install_commands import public
from flashvar.errors import ConfigurationError
from flashvar_factory.build import example, render, source, wheel
from flashvar_factory.config import schema, version
from flashvar_factory.config.expand import Build, expand, select_all
from flashvar_factory.config.selection_arguments import parse
from flashvar_factory.errors import ReleaseError
from flashvar_factory.release import gpu_records

ROOT = example.TEMPLATE
COMPILER = shutil.which("c++") or shutil.which("g++")
HOST_CUDA = Path(__file__).parents[2] / "kernels" / "host_cuda"
PAGE = Path(__file__).parents[3] / "docs" / "other-kernels.md"
CONFIG = schema.read(ROOT / "variants.toml")


def build_of(*words: str) -> Build:
    (build,) = expand(CONFIG, select_all(parse(words, CONFIG), CONFIG))
    return build


def test_word_of_an_axis_that_the_project_lacks_is_unknown() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(["hdim=4"], CONFIG)
    message = str(caught.value)
    assert "unknown key 'hdim', expected arch" in message
    assert "per_thread" in message
    assert message.count("hdim") == 2


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (["sm75"], ""),
        (["sm75", "per_thread=4"], "+perthread4"),
        (["sm75", "dtype=fp16", "ptx=1"], "+fp16.ptx"),
    ],
    ids=" ".join,
)
def test_version_label_is_of_its_axes(words: list[str], label: str) -> None:
    assert version.of_build("2.1.0", build_of(*words), CONFIG) == f"2.1.0{label}"


def test_the_page_about_other_kernels_has_these_names() -> None:
    build = build_of("sm75", "dtype=fp32", "per_thread=4")
    (kernel,) = build.kernels
    label = version.of_build("0.1.0", build_of("sm75", "per_thread=4"), CONFIG)
    page = PAGE.read_text(encoding="utf-8")
    assert f"(`{kernel.name}`) and of version labels (`{label}`)" in page


def test_instance_is_in_its_namespace() -> None:
    build = build_of("sm90", "dtype=fp16", "per_thread=4")
    text = render.instance(build.kernels[0], build, CONFIG)
    assert "flashvar" not in text.replace("flashvar_factory", "")
    assert '#include "simt/vector_add_launch.cuh"' in text
    assert "simt::VectorAddLaunch<Target<90, 232448>, dtype::fp16, 4>" in text
    assert 'gnu::section(".vecadd.kernels")' in text


@pytest.mark.parametrize(
    ("dev", "words"), [("", "sm_90"), ("per_thread = [4]\n", "sm_90 per_thread=all")], ids=str
)
def test_the_command_that_renews_a_gpu_record_names_its_axes(
    tmp_path: Path, dev: str, words: str
) -> None:
    shutil.copytree(ROOT, tmp_path / "project")
    file = tmp_path / "project" / "variants.toml"
    file.write_text(file.read_text(encoding="utf-8") + dev, encoding="utf-8")
    with pytest.raises(ReleaseError, match=f"nox -s build-dev -- {words} && nox -s gpu"):
        gpu_records.choose(file.parent, [gpu_records.RecordNeed("sm_90", ())])


def test_a_project_without_a_wheel_of_its_own(tmp_path: Path) -> None:
    assert not wheel.has_pure(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n', encoding="utf-8")
    assert wheel.has_pure(tmp_path)


@pytest.mark.parametrize(
    ("names", "owner"),
    [
        (["vecadd"], "the project in variants.toml"),
        (["Vecadd_sm75"], "sm_75 in variants.toml"),
        (["vecadd-tools", "vecadd.tools"], "packages/0/pyproject.toml"),
    ],
    ids=["project", "architecture", "package"],
)
def test_a_package_has_a_distribution_of_its_own(
    names: list[str], owner: str, tmp_path: Path
) -> None:
    for number, name in enumerate(names):
        file = tmp_path / "packages" / str(number) / "pyproject.toml"
        file.parent.mkdir(parents=True)
        file.write_text(f'[project]\nname = "{name}"\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="expected a distribution of its own") as caught:
        wheel.makers(CONFIG, tmp_path)
    assert f"{owner}; rename one" in str(caught.value)


@pytest.mark.parametrize("changed", ["CMakeLists.txt", "src/cuda/x.cu", "factory/cmake/x.cmake"])
def test_hash_is_of_the_project_and_of_the_cmake_that_builds_it(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "HOME", tmp_path / "factory")
    for name in ("CMakeLists.txt", "src/cuda/x.cu", "factory/cmake/x.cmake"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before", encoding="utf-8")
    before = source.gather(tmp_path, "").hash
    assert source.gather(tmp_path, "").hash == before
    (tmp_path / changed).write_text("after", encoding="utf-8")
    assert source.gather(tmp_path, "").hash != before


def test_hash_of_the_factorys_checkout_is_the_same_by_an_installed_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    for name in ("CMakeLists.txt", "cmake/x.cmake", "cmake/x.py", "src/cuda/x.cu"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("before", encoding="utf-8")
    shutil.copytree(checkout / "cmake", installed / "cmake")
    (installed / "cmake" / "__pycache__").mkdir()
    (installed / "cmake" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"compiled")
    monkeypatch.setattr(source, "HOME", checkout)
    own = source.gather(checkout, "").hash
    monkeypatch.setattr(source, "HOME", installed)
    assert source.gather(checkout, "").hash == own
    (installed / "cmake" / "x.cmake").write_text("after", encoding="utf-8")
    assert source.gather(checkout, "").hash != own


class Session:
    """Of nox: what a session installs, and the commands it runs."""

    def __init__(self, *arguments: str) -> None:
        self.posargs = list(arguments)
        self.installed: list[tuple[str, ...]] = []
        self.commands: list[tuple[str, ...]] = []

    def install(self, *arguments: str) -> None:
        self.installed.append(arguments)

    def run(self, *command: str) -> None:
        self.commands.append(command)

    def error(self, text: str) -> None:
        raise RuntimeError(text)


@pytest.fixture
def noxfile(tmp_path: Path) -> Any:
    """Of a project with a wheel that is built."""
    example.write("mine", tmp_path / "mine")
    (tmp_path / "mine" / "dist").mkdir()
    (tmp_path / "mine" / "build" / "index").mkdir(parents=True)
    (tmp_path / "mine" / "dist" / "mine_sm75-0.1.0-py3-none-any.whl").touch()
    return loaded_noxfile.load(tmp_path / "mine" / "noxfile.py")


def test_its_sessions_install_the_factory_of_the_project(noxfile: Any, tmp_path: Path) -> None:
    session = Session()
    noxfile.wheels(session)
    folder = tmp_path / "mine" / "vendor"
    folder.mkdir()
    for newer in ("0.9.0", "0.10.0"):
        wheel_of_the_factory = folder / f"flashvar_factory-{newer}-py3-none-any.whl"
        wheel_of_the_factory.touch()
    noxfile.wheels(session)
    first, second = session.installed
    assert Requirement(*first).specifier.contains(public(__version__))
    found = Requirement(*second)
    assert (found.name, found.extras) == ("flashvar-factory", {"audit", "cuda"})
    assert found.url == wheel_of_the_factory.as_uri()


def test_its_tests_find_torch_before_the_index_is_asked(noxfile: Any) -> None:
    """The index has nothing but the project's wheels."""
    noxfile.ALSO.append("torch>=2.13")
    session = Session("numpy")
    noxfile.tests(session)
    before, wheels = session.installed
    assert {"torch>=2.13", "numpy"} < set(before)
    assert wheels[0] == "--index-url"
    assert wheels[2:] == ("mine_sm75",)
    noxfile.wheels(session)
    assert "torch>=2.13" in session.installed[-1]


@pytest.mark.parametrize("missing", ["dist/mine_sm75-0.1.0-py3-none-any.whl", "build/index"])
def test_its_tests_need_wheels(missing: str, noxfile: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine" / missing
    path.rename(tmp_path / "away")
    session = Session()
    with pytest.raises(RuntimeError, match="run `nox -s wheels`"):
        noxfile.tests(session)
    assert session.installed == []


@pytest.mark.skipif(COMPILER is None, reason="compiles with a C++ compiler")
@pytest.mark.parametrize("name", ["mine", "find", "message", "kernel", "params", "dtype", "x"])
def test_its_interface_compiles_in_a_namespace_of_any_name(name: str, tmp_path: Path) -> None:
    example.write(name, tmp_path / name)
    sources = tmp_path / name / "src" / "cuda"
    table = "constexpr const VectorAddKernel* kVectorAddKernels[] = {nullptr};\n"
    (sources / "vector_add_kernels.inc").write_text(table, encoding="utf-8")
    assert COMPILER is not None
    folders = [f"-I{sources}", f"-I{HOST_CUDA}"]
    file = str(sources / "abi" / "vector_add.cc")
    command = [COMPILER, "-std=c++17", "-fsyntax-only", *folders, file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
