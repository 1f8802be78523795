"""Another project, of other kernels, is built by the factory with the commands of its page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import second_project
from checkout import small_project
from documented import shown_after
from elftools.elf.elffile import ELFFile
from shell import Shell, commands, unnoticed

from flashvar.binaries import manifest
from flashvar_factory.build import example

ROOT = Path(__file__).parents[2]
PROJECT = example.TEMPLATE
PAGE = (ROOT / second_project.PAGE).read_text(encoding="utf-8")
BLOCK = second_project.typed()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")}
PACKAGE = "A package that picks the wheel"
# Sections that add to the project: test_torch_coupled.py tries the one, a test below the other.
ADDED = {"Libraries that call torch", PACKAGE}
BLOCK_OF = re.compile(r"^```(cmake|cpp|python|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = [
    text
    for name, part in SECTIONS.items()
    if name not in ADDED
    for _, text in BLOCK_OF.findall(part)
]

# What a loader of that project would do, with nothing but its wheel and the standard library.
ASK = """
import ctypes, json, sys
from importlib import metadata
from pathlib import Path

class Params(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("length", ctypes.c_int64), ("stream", ctypes.c_void_p),
        ("dtype", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
    ]

(entry,) = metadata.entry_points(group="vecadd.binaries")
folder = Path(entry.dist.locate_file(entry.value))
described = json.loads((folder / "manifest.json").read_text())
library = ctypes.CDLL(str(folder / described["library"]["file"]))
library.vecadd_build_info.restype = library.vecadd_last_error.restype = ctypes.c_char_p

def call(length, dtype):
    status = library.vecadd_vector_add(ctypes.byref(Params(length=length, dtype=dtype)))
    return [status, library.vecadd_last_error().decode()]

json.dump({
    "entry": [entry.name, entry.value],
    "abi": [library.vecadd_abi_version(), described["abi"]],
    "info": json.loads(library.vecadd_build_info()),
    "empty": call(0, 0),
    "other dtype": call(1000, 7),
    "no device": call(1000, 0),
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A copy of the project on which the page's commands do what it says, and no misspelling.

    It has half of the kernels; test_documented_commands.py builds all of them.
    """
    folder = small_project(tmp_path_factory.mktemp("other") / "vecadd")
    config = folder / "variants.toml"
    text = config.read_text(encoding="utf-8")
    fewer = text.replace('\ndtype = ["fp32", "fp16"]', '\ndtype = ["fp32"]')
    assert fewer != text
    config.write_text(fewer, encoding="utf-8")
    program = tmp_path_factory.mktemp("bin") / "wheel-factory"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flashvar_factory "$@"\n')
    program.chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src" / "python"),
    }
    shell = Shell(folder, environ, program.with_name("state"))
    every = pytestconfig.getoption("--misspell") == "every"
    assert unnoticed(BLOCK, shell, shown_after(BLOCK), every=every) == []
    return folder


@pytest.fixture(scope="module")
def answers(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the library says after its wheel was installed from the index; no GPU is shown to it."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment)
    python = str(environment / "bin" / "python")
    site = (project / "build" / "index").as_uri() + "/"
    # The pip of this environment: one of its own takes seconds to put there.
    pip = [sys.executable, "-m", "pip", "--python", python, "--isolated", "install", "--quiet"]
    pip += ["--index-url", site, "vecadd-sm90"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    installed = subprocess.run(pip, env=environ, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    environ["CUDA_VISIBLE_DEVICES"] = ""
    asked = subprocess.run([python, "-c", ASK], env=environ, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


def test_the_page_has_a_command_for_each_step() -> None:
    typed = [command.split()[:2] for command in commands(BLOCK.text)]
    assert typed == [["wheel-factory", step] for step in ("list", "build", "wheels", "index")]


@pytest.mark.parametrize("block", QUOTED, ids=lambda block: block.splitlines()[0])
def test_the_page_quotes_the_project(block: str) -> None:
    cuda = [*PROJECT.rglob("CMakeLists.txt"), *PROJECT.rglob("*.cuh"), *PROJECT.rglob("*.h")]
    files = [PROJECT / "variants.toml", *cuda]
    assert any(block in file.read_text(encoding="utf-8") for file in files)


def test_development_build_holds_what_was_selected(project: Path) -> None:
    read = manifest.read(project / "build" / "dev" / "site" / "vecadd_sm75" / manifest.FILE_NAME)
    assert read.version == "0.1.0+perthread4"
    assert [row.name for row in read.kernels] == ["vector_add_fp32_per_thread4"]
    assert {(row.threads, row.tile, row.family) for row in read.kernels} == {(256, (1024,), "simt")}
    assert all(row.registers > 0 for row in read.kernels)


def test_wheels_are_those_of_the_project_and_no_pure_one(project: Path) -> None:
    names = sorted(path.name.partition("-py3")[0] for path in (project / "dist").iterdir())
    assert names == ["vecadd_sm75-0.1.0", "vecadd_sm90-0.1.0"]
    pages = {path.parent.name for path in (project / "build" / "index").glob("*/index.html")}
    assert pages == {"vecadd-sm75", "vecadd-sm90"}


def test_nothing_but_the_interface_is_exported(project: Path) -> None:
    (library,) = (project / "build" / "dev" / "site").glob("*/*.so")
    with library.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        exported = {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"}
    assert exported == {
        f"vecadd_{name}" for name in ("abi_version", "build_info", "last_error", "vector_add")
    }


@pytest.mark.parametrize("wheel", ["sm75", "sm90"])
def test_wheel_is_for_old_systems(project: Path, wheel: str) -> None:
    (path,) = (project / "dist").glob(f"vecadd_{wheel}-*.whl")
    command = [sys.executable, "-m", "auditwheel", "show", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    match = re.search(r'platform tag:\s+"manylinux_2_(\d+)_', done.stdout)
    assert match is not None, done.stdout
    assert int(match[1]) <= 28


def test_installed_library_is_what_it_says(answers: dict[str, Any]) -> None:
    assert answers["entry"] == ["sm_90", "vecadd_sm90"]
    assert answers["abi"] == [1, 1]
    assert (answers["info"]["architecture"], answers["info"]["version"]) == ("sm_90", "0.1.0")


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("empty", 0, ""),
        ("other dtype", 1, "no vector_add kernel for dtype 7"),
        ("no device", 2, "vector_add: "),
    ],
)
def test_calls_without_a_gpu_say_what_happened(
    answers: dict[str, Any], case: str, status: int, message: str
) -> None:
    assert answers[case][0] == status
    assert answers[case][1].startswith(message)


def test_message_of_cuda_is_passed_on(answers: dict[str, Any]) -> None:
    assert re.search("CUDA", answers["no device"][1])


LOAD = """
import vecadd
print(vecadd.load(9, 0).vecadd_abi_version(), vecadd.load(9, 3).vecadd_abi_version())
try:
    vecadd.load(7, 5)
except ImportError as error:
    print(error)
"""


def test_a_package_brings_the_wheel_and_loads_it(project: Path, tmp_path: Path) -> None:
    """The two files of the page, in the project: pip finds the wheel by an extra."""
    files = {"toml": Path("pyproject.toml"), "python": Path("src", "vecadd", "__init__.py")}
    folder = shutil.copytree(
        project, tmp_path / "vecadd", symlinks=True, ignore=shutil.ignore_patterns("build")
    )
    for language, text in BLOCK_OF.findall(SECTIONS[PACKAGE]):
        path = folder / files.pop(language)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert files == {}
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src" / "python")}
    audit = ["audit", "dist/vecadd-0.1.0-py3-none-any.whl"]
    for words in (["wheels", "--project-only"], audit, ["index"]):
        command = [sys.executable, "-m", "flashvar_factory", *words]
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    site = (folder / "build" / "index").as_uri() + "/"
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--index-url", site]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), "vecadd[sm90]"], check=True)
    command = [sys.executable, "-c", LOAD]
    environ["PYTHONPATH"] = str(tmp_path / "site")
    said = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert said.stdout.splitlines() == [
        "1 1",
        "no kernels for 7.5: pip install 'vecadd[sm75]'",
    ], said.stderr


# What is hidden, how, and the command that refuses it with its exit code.
HIDDEN = {
    "vecadd_vector_add": (
        "VECADD_API vecadd_status vecadd_v",
        "vecadd_status vecadd_v",
        "build",
        4,
    ),
    "every function": ('__attribute__((visibility("default")))', "", "wheels", 5),
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_hidden_functions_are_refused_at_build(hidden: str, tmp_path: Path) -> None:
    old, new, command, code = HIDDEN[hidden]
    folder = small_project(tmp_path / "vecadd")
    header = folder / "src" / "cuda" / "abi" / "vecadd.h"
    text = header.read_text(encoding="utf-8")
    assert old in text
    header.write_text(text.replace(old, new), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "flashvar_factory", command, "sm90", "dtype=fp32", "per_thread=1"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src" / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, done.stdout[-3000:]
    name = "vecadd_abi_version" if hidden == "every function" else hidden
    assert f'extern "C" __attribute__((visibility("default"))) ... {name}(...);' in done.stdout
    found = "found none" if hidden == "every function" else "found vecadd_abi_version, "
    assert found in done.stdout
    assert not (folder / "dist").exists()
