"""Another processor: what it takes, from machines made of folders and scripts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matrix import CONFIG, TEXT
from shell_script import script

from flashvar.errors import ConfigurationError
from flashvar_factory.build import render
from flashvar_factory.build.configure import CROSS_FILE, configure
from flashvar_factory.cli import main
from flashvar_factory.config import extras, schema, this_machine
from flashvar_factory.config.expand import Build, expand, select_all, select_dev
from flashvar_factory.config.selection_arguments import parse
from flashvar_factory.errors import CrossToolchainError
from flashvar_factory.toolchain import cross
from flashvar_factory.toolchain.cross import Cross
from flashvar_factory.toolchain.nvcc import Toolchain

ROOT = Path(__file__).parents[3]
OTHER = next(name for name in schema.PLATFORMS if name != this_machine.PROCESSOR)
TOOLS = Cross(
    "aarch64", Path("/bin/aarch64-linux-gnu-g++"), Path("/cuda/include"), Path("/arm/lib")
)


def selected(words: str, config: schema.Config = CONFIG) -> tuple[Build, ...]:
    return expand(config, select_all(parse(words.split(), config), config))


@pytest.fixture
def find(tmp_path: Path) -> Callable[[], Cross | None]:
    """`find()` asks for the other processor on a machine that has its compiler and its runtime."""
    compiler = f"{cross.TRIPLETS[OTHER].replace('x86-64', 'x86_64')}-g++"
    script(tmp_path / "bin" / compiler, "exit 0")
    includes = tmp_path / "cuda" / "include"
    nvcc = script(tmp_path / "cuda" / "nvcc", f"echo '#$ INCLUDES=\"-I{includes}\" ' >&2")
    folder = tmp_path / cross.FOLDER.format(platform=OTHER, version="13.0.88")
    (folder / "nvidia/cu13/lib").mkdir(parents=True)
    (folder / "nvidia/cu13/lib/libcudart_static.a").touch()
    environ = {"PATH": str(tmp_path / "bin")}
    return lambda: cross.find(OTHER, nvcc, "13.0.88", environ=environ, root=tmp_path)


def test_this_machine_needs_nothing(tmp_path: Path) -> None:
    assert (
        cross.find(this_machine.PROCESSOR, tmp_path, "13.0.88", environ={}, root=tmp_path) is None
    )


def test_compiler_headers_and_runtime(find: Callable[[], Cross | None], tmp_path: Path) -> None:
    found = find()
    assert found is not None
    assert found.compiler.parent == tmp_path / "bin"
    assert found.headers == tmp_path / "cuda" / "include"
    assert found.libraries.relative_to(tmp_path).as_posix().endswith("13.0.88/nvidia/cu13/lib")


def test_no_compiler_names_the_packages(tmp_path: Path) -> None:
    with pytest.raises(CrossToolchainError) as caught:
        cross.find(OTHER, tmp_path, "13.0.88", environ={"PATH": ""}, root=tmp_path)
    assert f"apt-get install g++-{cross.TRIPLETS[OTHER]}" in str(caught.value)
    assert "qemu-user" in str(caught.value)


# What pip does with `--target FOLDER WHEEL`, its last words.
PIP = """for word; do folder=$wheel; wheel=$word; done
mkdir -p $folder/nvidia/cu13/lib; touch $folder/nvidia/cu13/lib/libcudart_static.a"""


@pytest.mark.parametrize("meanwhile", ["", "cp -r $folder {folder}"], ids=["alone", "another"])
def test_the_runtime_is_fetched_whole(
    find: Callable[[], Cross | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: str,
) -> None:
    folder = tmp_path / cross.FOLDER.format(platform=OTHER, version="13.0.88")
    shutil.rmtree(folder)
    pip = script(tmp_path / "python", f"{PIP}\n{meanwhile.format(folder=folder)}")
    monkeypatch.setattr(sys, "executable", str(pip))
    found = find()
    assert found is not None
    assert found.libraries == folder / "nvidia/cu13/lib"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_runtime_that_cannot_be_had_leaves_nothing(
    find: Callable[[], Cross | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / cross.FOLDER.format(platform=OTHER, version="13.0.88")
    shutil.rmtree(folder)
    monkeypatch.setattr(sys, "executable", str(script(tmp_path / "python", f"{PIP}; exit 1")))
    with pytest.raises(CrossToolchainError, match=f"by hand: python .* --target {folder} "):
        find()
    assert list(folder.parent.iterdir()) == []


def test_an_nvcc_that_says_nothing_is_refused(
    find: Callable[[], Cross | None], tmp_path: Path
) -> None:
    script(tmp_path / "cuda" / "nvcc", "echo broken")
    with pytest.raises(CrossToolchainError, match=r"INCLUDES.*broken"):
        find()


def test_the_command_ends_with_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = "Cuda compilation tools, release 13.0, V13.0.88"
    script(tmp_path / "nvcc", f"echo '{release}'")
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    words = ["arch=sm_90", f"platform={OTHER}"]
    assert main(["wheels", "--root", str(ROOT), *words, "--output", str(tmp_path)]) == 7
    assert "apt-get install" in capsys.readouterr().err


PLATFORMS = {
    "platform=x86_64": ["sm_80", "sm_86", "sm_89", "sm_90"],
    "platform=aarch64": ["sm_90"],
    "platform=aarch64 all": ["sm_90"],
    "platform=aarch64 sm90": ["sm_90"],
}


@pytest.mark.parametrize("words", PLATFORMS)
def test_variants_toml_says_which_wheels_a_platform_has(words: str) -> None:
    builds = selected(words)
    assert [build.target.architecture.name for build in builds] == PLATFORMS[words]
    assert {build.platform for build in builds} == {words.split()[0].partition("=")[2]}


def test_a_wheel_that_a_platform_lacks_is_refused() -> None:
    found = "with wheels for it, sm_90, found sm_80; pass platform=x86_64, or add it"
    with pytest.raises(ConfigurationError, match=found):
        selected("platform=aarch64 sm80,sm90")


def test_a_platform_is_one_word_of_data() -> None:
    line = 'distribution = "flashvar-sm80"'
    config = schema.parse(TEXT.replace(line, f'{line}, platforms = ["aarch64"]'))
    assert [build.target.architecture.name for build in selected("platform=aarch64", config)] == [
        "sm_80",
        "sm_90",
    ]
    (requirement,) = extras.extras(config, "1.0")["sm80"]
    assert requirement.endswith('sys_platform == "linux" and (platform_machine == "aarch64")')


@pytest.mark.parametrize("value", ['["arm64"]', "[]", '"aarch64"', '["aarch64", "aarch64"]'])
def test_platforms_are_read_strictly(value: str) -> None:
    line = 'platforms = ["x86_64", "aarch64"]'
    assert TEXT.count(line) == 1
    with pytest.raises(ConfigurationError, match=r"sm_90\.platforms"):
        schema.parse(TEXT.replace(line, f"platforms = {value}"))


def test_development_is_for_this_machine() -> None:
    words = parse([f"platform={OTHER}"], CONFIG)
    with pytest.raises(ConfigurationError, match=f"expected {this_machine.PROCESSOR}"):
        select_dev(words, CONFIG, [])


def test_cmake_is_told_of_the_other_processor(tmp_path: Path) -> None:
    nvcc = Toolchain(Path("/cuda/bin/nvcc"), "13.0.88", None, "PATH")
    (build,) = selected("platform=aarch64 hdim=32")
    plan = configure(
        CONFIG, build, replace(nvcc, cross=TOOLS), root=ROOT, directory=tmp_path / "plan"
    )
    text = (plan.directory / CROSS_FILE).read_text(encoding="utf-8")
    assert text == render.cross_cmake(TOOLS)
    assert 'set(CMAKE_SYSTEM_PROCESSOR "aarch64")' in text
    assert 'set(CMAKE_CUDA_HOST_COMPILER "/bin/aarch64-linux-gnu-g++")' in text
    assert 'set(CMAKE_CUDA_FLAGS_INIT "-isystem /cuda/include -L/arm/lib")' in text
    assert '"platform": "linux_aarch64"' in (plan.directory / "plan.json").read_text()
