"""Makes a toolkit whose nvcc is this machine's and whose ptxas and CUDA runtime are older.

PyPI has no nvcc of CUDA 12, only its ptxas, its runtime and the runtime's headers. They are put
into a folder that is laid out like a toolkit, with the nvcc of this machine, which finds its tools
beside itself: callers of nvcc need no change. The folder's ptxas is a script that labels the PTX
with the version that the older ptxas reads.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from flashvar_factory.config import this_machine
from flashvar_factory.config.older_toolkits import OlderToolkit
from flashvar_factory.errors import ToolchainError
from flashvar_factory.toolchain import cross, pypi
from flashvar_factory.toolchain.nvcc import Toolchain

FOLDER: Final = "build/toolkit-cu{cuda}-{ptxas}-{runtime}-nvcc-{nvcc}"

# Where the packages put them, below the folders that they are unpacked in.
_ASSEMBLER: Final = "ptxas/nvidia/cuda_nvcc/bin/ptxas"
_RUNTIME: Final = "runtime/nvidia/cuda_runtime"
_OF_NVCC: Final = ("crt", "fatbinary_section.h", "cccl")

_TOP = re.compile(r"^#\$ TOP=(?P<path>.+)$", re.MULTILINE)
# Instructions newer than the label are an error of ptxas.
_PTXAS = """\
#!/bin/sh
# Calls ptxas {version} with the PTX of nvcc {nvcc}, labeled as PTX {ptx}.
for word do
  shift
  case $word in
    *.ptx)
      sed 's/^\\.version [0-9.]*$/.version {ptx}/' "$word" > "$word.{ptx}.ptx" || exit
      word=$word.{ptx}.ptx ;;
  esac
  set -- "$@" "$word"
done
exec "${{0%/*}}/../{assembler}" "$@"
"""


def complete(toolchain: Toolchain, older: OlderToolkit | None, root: Path) -> Toolchain:
    """The toolchain of a binary: as it is, or with machine code and runtime of `older`.

    Fetches what it lacks. ToolchainError when it cannot be had; CrossToolchainError for another
    processor's runtime.
    """
    if older is None:
        return toolchain
    folder = root / FOLDER.format(
        cuda=older.cuda,
        ptxas=older.version,
        runtime=older.runtime_version,
        nvcc=toolchain.version,
    )
    if not folder.is_dir():
        _make(folder, toolchain, older)
    other = toolchain.cross
    if other is not None:
        version = older.runtime_version
        target = root / cross.FOLDER.format(platform=other.platform, version=version)
        libraries = cross.runtime(older.runtime, other.platform, target)
        other = replace(other, headers=(folder / "include").resolve(), libraries=libraries)
    return replace(
        toolchain,
        nvcc=folder / "bin" / "nvcc",
        library_dir=folder / "lib",
        origin=f"{toolchain.origin}, with ptxas {older.version}",
        cross=other,
    )


def _make(folder: Path, toolchain: Toolchain, older: OlderToolkit) -> None:
    """Fill `folder` at once: it never exists in part."""
    top = _top(toolchain.nvcc)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        fresh = Path(temporary, "fresh")
        pypi.fetch(older.ptxas, this_machine.PROCESSOR, fresh / "ptxas")
        pypi.fetch(older.runtime, this_machine.PROCESSOR, fresh / "runtime")
        if not (fresh / _ASSEMBLER).is_file() or not (fresh / _RUNTIME / "lib").is_dir():
            raise ToolchainError(
                f"expected bin/ptxas in {older.ptxas} and lib in {older.runtime}, found another "
                "layout; name other versions in [toolkits] of variants.toml"
            )
        _tools(fresh, top, toolchain, older)
        _headers(fresh, top)
        (fresh / "lib").symlink_to(f"{_RUNTIME}/lib")
        (fresh / "lib64").symlink_to("lib")
        pypi.publish(fresh, folder)


def _tools(fresh: Path, top: Path, toolchain: Toolchain, older: OlderToolkit) -> None:
    """nvcc and what it calls; all but nvcc and ptxas stay where they are."""
    tools = fresh / "bin"
    tools.mkdir()
    for tool in (top / "bin").iterdir():
        if tool.name not in ("nvcc", "ptxas", "nvcc.profile"):
            (tools / tool.name).symlink_to(tool)
    for name in ("nvcc", "nvcc.profile"):  # the compiler's real path is that of the toolkit
        shutil.copy2(top / "bin" / name, tools / name)
    (fresh / "nvvm").symlink_to(top / "nvvm")
    script = _PTXAS.format(
        version=older.version, nvcc=toolchain.version, ptx=older.ptx, assembler=_ASSEMBLER
    )
    (tools / "ptxas").write_text(script, encoding="utf-8")
    (tools / "ptxas").chmod(0o755)


def _headers(fresh: Path, top: Path) -> None:
    """Those of the older CUDA runtime; what nvcc's own output includes is of nvcc."""
    headers = fresh / "include"
    headers.mkdir()
    for header in (fresh / _RUNTIME / "include").iterdir():
        (headers / header.name).symlink_to(os.path.relpath(header, headers))
    for name in _OF_NVCC:
        (headers / name).unlink(missing_ok=True)
        (headers / name).symlink_to(top / "include" / name)


def _top(nvcc: Path) -> Path:
    """The folder of the toolkit that an nvcc belongs to, wherever a link or a script leads."""
    command = [str(nvcc), "--dryrun", "-c", "-x", "cu", os.devnull]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    match = _TOP.search(done.stdout)
    top = Path(match["path"]).resolve() if match else None
    if top is None or not (top / "bin" / "nvcc.profile").is_file():
        raise ToolchainError(
            f"expected {nvcc} --dryrun to print TOP=, the folder of its toolkit, found: "
            f"{done.stdout.strip()[:500]}"
        )
    return top
