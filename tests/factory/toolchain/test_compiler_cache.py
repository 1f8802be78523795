"""The words of a compiler cache, and the shards of a matrix."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from flashvar_factory.build import cmake
from flashvar_factory.build.configure import BuildPlan
from flashvar_factory.cli import selected
from flashvar_factory.config import schema
from flashvar_factory.config.expand import Build, expand, select_all
from flashvar_factory.config.selection_arguments import CacheChoice, parse
from flashvar_factory.errors import ToolchainError
from flashvar_factory.toolchain import compiler_cache
from flashvar_factory.toolchain.nvcc import Toolchain

ROOT = Path(__file__).parents[3]
CONFIG = schema.read(ROOT / "variants.toml")


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both caches, the only one where programs are found."""
    for name in ("sccache", "ccache"):
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    return tmp_path


def test_no_cache_is_no_launcher() -> None:
    assert compiler_cache.launcher("none", ROOT) == ()


@pytest.mark.parametrize(
    ("choice", "settings"),
    [
        ("sccache", ["SCCACHE_BASEDIRS=/project"]),
        (
            "ccache",
            [
                "CCACHE_BASEDIR=/project",
                "CCACHE_NOHASHDIR=1",
                "CCACHE_IGNOREOPTIONS=-Xcompiler=-ffile-prefix-map=*",
            ],
        ),
    ],
)
def test_a_cache_answers_in_every_folder(
    choice: CacheChoice, settings: list[str], caches: Path
) -> None:
    launcher = compiler_cache.launcher(choice, Path("/project"))
    assert launcher == ("env", *settings, str(caches / choice))


@pytest.mark.parametrize("choice", ["sccache", "ccache"])
def test_a_cache_that_is_not_there(choice: CacheChoice, caches: Path) -> None:
    (caches / choice).unlink()
    with pytest.raises(
        ToolchainError, match=rf"cache={choice}: expected {choice} .* install"
    ) as it:
        compiler_cache.launcher(choice, ROOT)
    assert it.value.exit_code == 3


@pytest.mark.parametrize("launcher", [(), ("env", "A=1", "/bin/sccache")], ids=["none", "sccache"])
def test_cmake_puts_it_before_both_compilers(launcher: tuple[str, ...], tmp_path: Path) -> None:
    (build,) = expand(CONFIG, select_all(parse(["sm80", "platform=x86_64"], CONFIG), CONFIG))
    nvcc = Toolchain(Path("/cuda/bin/nvcc"), "13.0.88", None, "PATH", launcher=launcher)
    found = cmake.definitions(BuildPlan(build, "1.0", tmp_path), nvcc)
    names = ("CMAKE_CXX_COMPILER_LAUNCHER", "FLASHVAR_CUDA_LAUNCHER")
    expected = dict.fromkeys(names, ";".join(launcher)) if launcher else {}
    assert {name: found[name] for name in names if name in found} == expected


def shard(words: str) -> tuple[Build, ...]:
    arguments = argparse.Namespace(root=ROOT, selection=[*words.split(), "platform=x86_64"])
    return selected.read(arguments).for_release()


@pytest.mark.parametrize("count", range(1, 7))
def test_shards_are_a_partition_by_distribution(count: int) -> None:
    parts = [shard(f"all shard={number}/{count}") for number in range(1, count + 1)]
    sizes = [len(part) for part in parts]
    names = [build.distribution for part in parts for build in part]
    assert sorted(names) == sorted(build.distribution for build in shard("all"))
    assert max(sizes) - min(sizes) <= 1
    assert parts == [shard(f"all shard={number}/{count}") for number in range(1, count + 1)]


def test_a_shard_is_of_what_was_selected() -> None:
    assert [build.target.architecture.name for build in shard("arch=sm_80,sm_89 shard=2/2")] == [
        "sm_89"
    ]


def test_the_first_shard_makes_what_is_of_no_architecture() -> None:
    firsts = [
        selected.read(argparse.Namespace(root=ROOT, selection=[f"shard={i}/3"])).first_shard()
        for i in (1, 2, 3)
    ]
    assert firsts == [True, False, False]
