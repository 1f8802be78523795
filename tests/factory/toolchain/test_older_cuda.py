"""A toolkit of an older CUDA: how it is put together, and what its ptxas is handed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from shell_script import script

from flashvar_factory.config import this_machine
from flashvar_factory.config.older_toolkits import OlderToolkit
from flashvar_factory.errors import ToolchainError
from flashvar_factory.toolchain import cross, older_cuda
from flashvar_factory.toolchain.cross import Cross
from flashvar_factory.toolchain.nvcc import Toolchain

OLDER = OlderToolkit(12, "8.8", "nvidia-cuda-nvcc-cu12==12.9.86", "some-runtime==12.9.79")
# What pip does with `--target FOLDER REQUIREMENT`, its last words.
PIP = """for word; do folder=$wheel; wheel=$word; done
case $wheel in
  *nvcc*) mkdir -p $folder/nvidia/cuda_nvcc/bin
    printf '#!/bin/sh\\necho "$@"; cat "$1"\\n' > $folder/nvidia/cuda_nvcc/bin/ptxas
    chmod +x $folder/nvidia/cuda_nvcc/bin/ptxas ;;
  *) mkdir -p $folder/nvidia/cuda_runtime/lib $folder/nvidia/cuda_runtime/include/crt
    touch $folder/nvidia/cuda_runtime/lib/libcudart_static.a
    touch $folder/nvidia/cuda_runtime/include/cuda_runtime.h ;;
esac
"""


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    """An nvcc of CUDA 13 with its tree, and a pip that makes the packages."""
    top = tmp_path / "cuda-13"
    nvcc = script(top / "bin" / "nvcc", f"echo '#$ TOP={top}' >&2")
    for name in ("nvcc.profile", "ptxas", "cudafe++"):
        (top / "bin" / name).touch()
    (top / "nvvm").mkdir()
    for name in ("crt", "cccl"):
        (top / "include" / name).mkdir(parents=True)
    (top / "include" / "fatbinary_section.h").touch()
    monkeypatch.setattr(sys, "executable", str(script(tmp_path / "python", PIP)))
    return Toolchain(nvcc, "13.0.88", None, "PATH")


def test_a_binary_of_the_compilers_own_toolkit_needs_nothing(tmp_path: Path) -> None:
    nvcc = Toolchain(Path("nvcc"), "13.0.88", None, "PATH")
    assert older_cuda.complete(nvcc, None, tmp_path) is nvcc


def test_the_compiler_stays_and_the_rest_is_older(toolchain: Toolchain, tmp_path: Path) -> None:
    found = older_cuda.complete(toolchain, OLDER, tmp_path)
    top, own = found.nvcc.parents[1], toolchain.nvcc.parents[1]
    assert found.version == "13.0.88"
    assert found.nvcc.read_text() == toolchain.nvcc.read_text()
    assert found.nvcc.resolve().parents[1] == top
    assert (top / "bin" / "cudafe++").resolve() == own / "bin" / "cudafe++"
    assert (top / "include" / "crt").resolve() == own / "include" / "crt"
    assert "cuda_runtime/include" in str((top / "include" / "cuda_runtime.h").resolve())
    assert found.library_dir is not None
    assert "cuda_runtime/lib" in str(found.library_dir.resolve())
    assert older_cuda.complete(toolchain, OLDER, tmp_path) == found


def test_ptxas_gets_the_ptx_under_the_older_version(toolchain: Toolchain, tmp_path: Path) -> None:
    ptxas = older_cuda.complete(toolchain, OLDER, tmp_path).nvcc.with_name("ptxas")
    ptx = tmp_path / "a b.ptx"
    ptx.write_text(".version 9.0\n.target sm_90a\n// .version 9.0\n", encoding="utf-8")
    command = [str(ptxas), str(ptx), "-arch=sm_90a", "-o", "x y.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words, *text = done.stdout.splitlines()
    assert words == f"{ptx}.8.8.ptx -arch=sm_90a -o x y.cubin"
    assert text == [".version 8.8", ".target sm_90a", "// .version 9.0"]
    assert ptx.read_text(encoding="utf-8").startswith(".version 9.0")


def test_another_processor_gets_its_own_runtime(toolchain: Toolchain, tmp_path: Path) -> None:
    tools = Cross("elsewhere", Path("/bin/g++"), Path("/cuda/include"), Path("/arm/lib"))
    found = older_cuda.complete(replace(toolchain, cross=tools), OLDER, tmp_path).cross
    assert found is not None
    place = cross.FOLDER.format(platform="elsewhere", version="12.9.79")
    assert found.libraries == tmp_path / place / "nvidia/cuda_runtime/lib"
    assert (found.headers / "cuda_runtime.h").exists()
    assert found.compiler == tools.compiler


def test_packages_that_cannot_be_had_leave_nothing(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(script(tmp_path / "python", "echo no; exit 1")))
    with pytest.raises(
        ToolchainError, match=f"expected {OLDER.ptxas} for {this_machine.PROCESSOR}"
    ):
        older_cuda.complete(toolchain, OLDER, tmp_path)
    assert list((tmp_path / "build").iterdir()) == []


def test_an_nvcc_that_does_not_name_its_toolkit_is_refused(
    toolchain: Toolchain, tmp_path: Path
) -> None:
    script(toolchain.nvcc, "echo broken")
    with pytest.raises(ToolchainError, match=r"TOP=.*broken"):
        older_cuda.complete(toolchain, OLDER, tmp_path)
