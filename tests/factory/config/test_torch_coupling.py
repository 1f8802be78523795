"""Libraries that call torch: what says so, what compiles them, what the audit takes."""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import fake_artifacts
import pytest
from audited import faults
from fake_artifacts import Wheel

from flashvar.binaries import manifest
from flashvar.binaries.manifest import Manifest
from flashvar.errors import ConfigurationError
from flashvar_factory.audit import platform_tag
from flashvar_factory.build import binary_project, example, self_contained
from flashvar_factory.config import expand, schema, torch_coupling
from flashvar_factory.config.expand import Build
from flashvar_factory.config.selection_arguments import SelectionArguments
from flashvar_factory.errors import CrossToolchainError, ToolchainError
from flashvar_factory.inspect import archive
from flashvar_factory.toolchain import torch_headers
from flashvar_factory.toolchain.cross import Cross
from flashvar_factory.toolchain.nvcc import Toolchain

PROJECT = (example.TEMPLATE / "variants.toml").read_text(encoding="utf-8")
LICENSE = 'license = "MIT"\n'
TOOLCHAIN = Toolchain(Path("nvcc"), "13.0.88", None, "PATH")


def coupled(version: str = '"2.10"') -> str:
    return PROJECT.replace(LICENSE, f"{LICENSE}torch = {version}\n")


def build_of(text: str) -> Build:
    config = schema.parse(text)
    return expand.expand(config, expand.select_all(SelectionArguments(), config))[0]


def test_the_oldest_torch_is_a_requirement_of_the_wheel() -> None:
    assert build_of(coupled()).torch == "2.10"
    assert binary_project.requirements_of("2.10") == ["torch>=2.10"]
    assert build_of(PROJECT).torch is None
    assert binary_project.requirements_of(None) == []


@pytest.mark.parametrize(
    "version", ['"2.8"', '"2"', '"3.0"', '"2.010"', '"2.10.1"', '">=2.10"', "2.10"]
)
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigurationError, match=r"project\.torch: expected the oldest version"):
        schema.parse(coupled(version))


def test_torch_knows_the_version() -> None:
    assert torch_coupling.target("2.10") == "0x020a000000000000"
    assert torch_coupling.target("2.9") == "0x0209000000000000"


def headers(folder: Path, major: int, minor: int) -> ModuleSpec:
    """A torch of some version, as far as it is looked at."""
    file = folder / "include" / "torch" / "headeronly" / "version.h"
    file.parent.mkdir(parents=True)
    lines = (
        f"#define TORCH_VERSION_{key} {value}"
        for key, value in (("MAJOR", major), ("MINOR", minor))
    )
    file.write_text("\n".join([*lines, "#define TORCH_VERSION_PATCH 0", ""]), encoding="utf-8")
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec


@pytest.mark.parametrize("oldest", ["2.9", "2.10", "2.11"])
def test_a_torch_that_is_new_enough_is_found(
    oldest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = headers(tmp_path, 2, 10)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    if oldest == "2.11":
        with pytest.raises(ToolchainError, match=r"torch 2.11 or newer .* found 2.10"):
            torch_headers.find(oldest, TOOLCHAIN)
    else:
        assert torch_headers.find(oldest, TOOLCHAIN) == tmp_path


def test_a_torch_behind_a_link_is_found_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = headers(tmp_path / "torch", 2, 10)
    (tmp_path / "link").symlink_to(tmp_path / "torch")
    spec.submodule_search_locations = [str(tmp_path / "link")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert torch_headers.find("2.10", TOOLCHAIN) == tmp_path / "torch"


@pytest.mark.parametrize("found", [None, ModuleSpec("torch", None)])
def test_without_torch_it_says_what_to_install(
    found: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    with pytest.raises(ToolchainError, match=r"pip install 'torch>=2\.10'"):
        torch_headers.find("2.10", TOOLCHAIN)


def test_another_processor_is_refused(tmp_path: Path) -> None:
    cross = Cross("aarch64", tmp_path, tmp_path, tmp_path)
    with pytest.raises(CrossToolchainError, match="platform=aarch64"):
        torch_headers.find("2.10", replace(TOOLCHAIN, cross=cross))


def test_a_project_that_needs_nothing_else_has_no_torch(tmp_path: Path) -> None:
    config = schema.parse(coupled())
    with pytest.raises(ConfigurationError, match="call no torch"):
        self_contained.write(config, build_of(coupled()), root=tmp_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def described(torch: str | None = "2.10") -> Manifest:
    return replace(fake_artifacts.manifest(), torch=torch)


def test_the_manifest_says_it() -> None:
    assert manifest.parse(described().to_json()) == described()
    assert '"torch"' not in described(None).to_json()


def wheel(*, torch: str | None = "2.10", required: str = "torch>=2.10", **changes: object) -> Wheel:
    """One whose library calls torch, with a change."""
    calls = {
        "needed": ("libc.so.6", "libtorch_cpu.so"),
        "undefined": (
            ("malloc", "GLIBC_2.2.5"),
            ("aoti_torch_get_numel", None),
            ("torch_call_dispatcher", None),
        ),
    }
    said = described(torch)
    made = Wheel(said, replace(fake_artifacts.library(said), **{**calls, **changes}))  # type: ignore[arg-type]
    name = f"{made.info}/METADATA"
    text = made.files()[name].decode()
    line = f"Requires-Python: >=3.10\nRequires-Dist: {required}\n" if required else ""
    text = text.replace("Requires-Python: >=3.10\n", line or "Requires-Python: >=3.10\n")
    made.more[name] = text.encode()
    return made


@pytest.mark.usefixtures("auditwheel")
def test_a_library_that_calls_the_stable_abi_passes(tmp_path: Path) -> None:
    assert faults(wheel().write(tmp_path)) == []


# What is changed, and a part of the sentence.
FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "C++ of torch": (
        {"undefined": (("_ZN3c105ErrorD1Ev", None), ("aoti_torch_get_numel", None))},
        "found _ZN3c105ErrorD1Ev",
    ),
    "a function of Python": ({"undefined": (("PyList_New", None),)}, "found PyList_New"),
    "another library of torch": (
        {"needed": ("libc.so.6", "libtorch_cpu.so", "libtorch_python.so")},
        "found libtorch_python.so",
    ),
    "a version of a symbol": (
        {"undefined": (("aoti_torch_get_numel", "TORCH_2"),)},
        "found aoti_torch_get_numel",
    ),
    "no requirement": ({"required": ""}, "expected requirements ['torch>=2.10'], found []"),
    "an older torch": ({"required": "torch>=2.9"}, "found ['torch>=2.9']"),
    "any torch": ({"required": "torch"}, "found ['torch']"),
    "a manifest that does not say it": ({"torch": None}, "found libtorch_cpu.so"),
}


@pytest.mark.usefixtures("auditwheel")
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_is_a_fault(fault: str, tmp_path: Path) -> None:
    changes, words = FAULTS[fault]
    assert any(words in one for one in faults(wheel(**changes).write(tmp_path)))  # type: ignore[arg-type]


ANSWER = (
    '{{"overall_tag": "linux_x86_64", "sym_tag": "manylinux_2_28_x86_64", '
    '"external_libs": {libraries}, "unsupported_isa": {isa}}}'
)


@pytest.mark.parametrize(
    ("libraries", "isa", "tag"),
    [
        ('{"libtorch_cpu.so": null}', "false", "manylinux_2_28_x86_64"),
        ('{"libtorch_cpu.so": null, "libz.so": null}', "false", "linux_x86_64"),
        ('{"libtorch_cpu.so": null}', "true", "linux_x86_64"),
        ("{}", "false", "linux_x86_64"),
    ],
)
def test_libraries_that_a_requirement_brings_count_for_nothing(
    libraries: str, isa: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wheel().write(tmp_path)
    answer = ANSWER.format(libraries=libraries, isa=isa)
    done = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    name = archive.parse_name(path.name)
    found = platform_tag.ask(path, name, torch_coupling.LIBRARIES)
    assert isinstance(found, platform_tag.Policy)
    assert found.tag == tag
