"""One line more for an architecture, one value more for a head dim: everything else follows."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import copied_sources

from flashvar.binaries import manifest
from flashvar_factory.config import extras, schema

Factory = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).parents[2]
LINE = """
[architectures]
sm_88 = { code = "88", family = "sm80", shared_memory = 101376, distribution = "flashvar-sm88" }"""
NAME = "attention_fwd_bf16_hdim112"
WORDS = ("sm88", "op=attention_fwd,merge_states_fwd", "hdim=112", "dtype=bf16")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the line and the value, in a folder with a space."""
    folder = tmp_path_factory.mktemp("a project")
    copied_sources(folder, "attention", "merge_states")
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    file = folder / "variants.toml"
    text = file.read_text(encoding="utf-8").replace("\n[architectures]", LINE)
    built = json.dumps(schema.read(ROOT / "variants.toml").axes["head_dim"])
    text = text.replace(f"head_dim = {built}", f"head_dim = {built[:-1]}, 112]")
    file.write_text(text, encoding="utf-8")
    assert "112]" in text
    return folder


def test_list_has_it(factory: Factory, tree: Path) -> None:
    document = json.loads(factory(tree, "list", "--json").stdout)
    kernels = {
        build["distribution"]: {kernel["name"] for kernel in build["kernels"]}
        for build in document["builds"]
    }
    assert "flashvar-sm88" in kernels
    assert all(NAME in names for names in kernels.values())


def test_extras_have_it(tree: Path) -> None:
    found = extras.extras(schema.read(tree / "variants.toml"), "1.0")
    assert found["sm88"][0].startswith("flashvar-sm88==1.0")
    assert found["sm88"][0] in found["all"]


def test_it_compiles_into_a_wheel(factory: Factory, tree: Path, tmp_path: Path) -> None:
    done = factory(tree, "wheels", *WORDS, "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout[-5000:]
    (wheel,) = tmp_path.glob("flashvar_sm88-*.whl")
    assert wheel.name.endswith(f"bf16.hdim112-py3-none-manylinux_2_28_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        read = manifest.parse(archive.read(f"flashvar_sm88/{manifest.FILE_NAME}").decode())
    assert read.architecture.name == "sm_88"
    assert NAME in {row.name for row in read.kernels}
    # An op without a head dim is there too, in that dtype.
    axes = (("dtype", "bf16"), ("head_dim", 112))
    assert {row.axes for row in read.kernels} == {axes, axes[:1]}
    assert all(row.registers > 0 for row in read.kernels)
    (pure,) = tmp_path.glob("flashvar-*.whl")
    with zipfile.ZipFile(pure) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        assert "Provides-Extra: sm88" in archive.read(name).decode().splitlines()
