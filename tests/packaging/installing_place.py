"""Environments that `flashvar install` is called in, and wheels without machine code for it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import fake_driver
import fake_wheels
import fakes

from flashvar._version import __version__
from flashvar.binaries.install_commands import public
from flashvar.binaries.kinds import Architecture
from flashvar.binaries.manifest import LibraryFile, MinimumDriver
from flashvar_factory.inspect import archive

ROOT = Path(__file__).parents[2]
VERSION = public(__version__)
LIBRARY = b"\x7fELF"
UV = str(Path(sys.executable).with_name("uv"))

RTX_4090 = ("NVIDIA GeForce RTX 4090", 8, 9)
RTX_3090 = ("NVIDIA GeForce RTX 3090", 8, 6)
V100 = ("Tesla V100", 7, 0)
CODE_13, CODE_12 = MinimumDriver((13, 0), "580"), MinimumDriver((12, 0), "525")

METADATA = f"""\
Metadata-Version: 2.4
Name: flashvar
Version: {VERSION}
Provides-Extra: sm89-cu12
Requires-Dist: flashvar-sm89-cu12=={VERSION} ; sys_platform == "linux" and extra == "sm89-cu12"
"""


class Place(NamedTuple):
    """An environment, and what has the wheels."""

    root: Path
    python: Path
    dist: Path
    site: Path

    def run(self, *words: str, **machine: Any) -> subprocess.CompletedProcess[str]:
        """`flashvar install ...` to its end, on a machine as `started` takes it."""
        process = self.started(*words, **machine)
        stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def started(
        self,
        *words: str,
        gpus: Sequence[tuple[str, int, int]] = (),
        cuda: tuple[int, int] = (13, 0),
        tools: str | None = None,
        settings: Mapping[str, str] | None = None,
        through: Path | None = None,
    ) -> subprocess.Popen[str]:
        """`flashvar install ...` on a machine with these GPUs; `through` another path of Python."""
        driver = self.root / "driver"
        shutil.rmtree(driver, ignore_errors=True)
        driver.mkdir()
        if gpus:
            fake_driver.put(driver, cuda, gpus)
        names = ("PIP_", "UV_", "FLASHVAR_", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")
        environ = {key: value for key, value in os.environ.items() if not key.startswith(names)}
        # Whoever is asked in spite of the named source has nothing to answer.
        environ |= {"LD_LIBRARY_PATH": str(driver), "PIP_EXTRA_INDEX_URL": "http://127.0.0.1:9/"}
        environ |= {"PATH": tools or f"{Path(UV).parent}:{environ['PATH']}", "UV_NO_CACHE": "1"}
        environ |= {"PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0", "UV_HTTP_RETRIES": "0"}
        environ |= settings or {}
        return subprocess.Popen(
            [str(through or self.python), "-m", "flashvar", "install", *words],
            cwd=self.root,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def files(self) -> dict[str, str]:
        """Every file of the environment, with its hash."""
        return {
            str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((self.root / "env").rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }

    def frozen(self) -> set[str]:
        """What the environment has, as the lines of a file of requirements say it."""
        freeze = [UV, "pip", "freeze", "--python", str(self.python)]
        if list(self.root.glob("env/lib/python*/site-packages/pip.pth")):
            freeze = [str(self.python), "-m", "pip", "freeze"]
        done = subprocess.run(freeze, check=True, capture_output=True, text=True)
        return set(done.stdout.replace("_", "-").splitlines())  # the names of fake wheels

    def installed(self) -> set[str]:
        """The binaries that are in the environment, whole."""
        found = (self.root / "env").glob("lib/python*/site-packages/flashvar_sm*/manifest.json")
        return {path.parent.name for path in found if list(path.parent.glob("*.so"))}


def wheel(folder: Path, code: str, suffix: str = "", driver: MinimumDriver = CODE_13) -> Path:
    """A binary wheel of an architecture, whose library is no library."""
    architecture = Architecture.parse(code)
    name = f"flashvar-{architecture.extra}{suffix}"
    stem = name.replace("-", "_")
    library = LibraryFile(f"lib{stem}.so", len(LIBRARY), hashlib.sha256(LIBRARY).hexdigest())
    said = replace(
        fakes.manifest(code, version=VERSION),
        distribution=name,
        minimum_driver=driver,
        library=library,
    )
    path = fake_wheels.binary(folder, said)
    files = archive.read(path)
    entry = f"[flashvar.binaries]\n{architecture.name} = {stem}\n"
    files[f"{stem}-{VERSION}.dist-info/entry_points.txt"] = entry.encode()
    archive.write(path, files, f"{stem}-{VERSION}.dist-info")
    return path
