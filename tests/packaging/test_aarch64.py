"""Wheels for another processor: cross-compiled here, and loaded by an emulator."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkout import alone
from elftools.elf.elffile import ELFFile

from flashvar.binaries import manifest
from flashvar_factory.config import schema, this_machine, version

from .conftest import ROOT, Factory

CONFIG = schema.read(ROOT / "variants.toml")
VERSION = version.read(CONFIG, ROOT)
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")  # glibc of that processor, of the cross compiler's packages

pytestmark = [
    pytest.mark.skipif(this_machine.PROCESSOR == "aarch64", reason="this machine is an aarch64"),
    pytest.mark.skipif(
        shutil.which(COMPILER) is None,
        reason=f"no {COMPILER}: apt-get install g++-aarch64-linux-gnu",
    ),
]

# What a Python there would do with ctypes.
LOADER = """
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char** words) {
  void* library = dlopen(words[count - 1], RTLD_NOW);
  if (!library) return fprintf(stderr, "%s\\n", dlerror()), 1;
  unsigned (*abi)() = reinterpret_cast<unsigned (*)()>(dlsym(library, "flashvar_abi_version"));
  const char* (*info)() =
      reinterpret_cast<const char* (*)()>(dlsym(library, "flashvar_build_info"));
  return !abi || !info || printf("%u %s\\n", abi(), info()) < 0;
}
"""


@pytest.fixture(scope="module")
def wheel(factory: Factory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("aarch64")
    words = ("sm90", "op=attention_fwd", "hdim=32", "dtype=bf16", "platform=aarch64")
    with alone():
        done = factory(ROOT, "wheels", *words, "--output", str(output))
    assert done.returncode == 0, done.stdout[-5000:]
    (made,) = output.glob("flashvar_sm90-*.whl")
    return made


@pytest.fixture(scope="module")
def package(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked-aarch64")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "flashvar_sm90"


def test_name_and_manifest_are_of_the_target(wheel: Path, package: Path) -> None:
    assert wheel.name == (
        f"flashvar_sm90-{VERSION}+attentionfwd.bf16.hdim32-py3-none-manylinux_2_28_aarch64.whl"
    )
    described = manifest.read(package / manifest.FILE_NAME)
    assert described.platform == "linux_aarch64"
    assert described.platform != f"linux_{platform.machine()}"


def test_the_library_is_of_the_target(package: Path) -> None:
    with (package / "libflashvar_sm90.so").open("rb") as file:
        assert ELFFile(file)["e_machine"] == "EM_AARCH64"


def test_the_audit_finds_nothing(factory: Factory, wheel: Path) -> None:
    done = factory(ROOT, "audit", str(wheel))
    assert done.returncode == 0, done.stdout + done.stderr


def test_auditwheel_says_manylinux_2_28_or_older(wheel: Path) -> None:
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    match = re.search(r'platform tag:\s+"manylinux_2_(\d+)_aarch64"', done.stdout)
    assert match is not None, done.stdout
    assert int(match[1]) <= 28


@pytest.mark.skipif(
    shutil.which(EMULATOR) is None, reason=f"no {EMULATOR}: apt-get install qemu-user"
)
def test_the_library_loads_there(package: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "loader.cc", tmp_path / "loader"
    source.write_text(LOADER, encoding="utf-8")
    subprocess.run([COMPILER, str(source), "-o", str(program), "-ldl"], check=True)
    command = [EMULATOR, "-L", str(SYSTEM), str(program), str(package / "libflashvar_sm90.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    abi, _, info = done.stdout.partition(" ")
    assert int(abi) == manifest.ABI
    assert json.loads(info)["architecture"] == "sm_90"
