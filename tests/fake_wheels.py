"""Fake wheels, small and complete: the project's own, and binary ones without machine code."""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path

from flashvar.binaries.manifest import Manifest
from flashvar_factory.inspect import archive

PLATFORM = f"manylinux_2_28_{platform.machine()}"


def bare(folder: Path, name: str, version: str, requires_python: str | None = ">=3.10") -> Path:
    """A wheel that is its metadata and nothing else."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires_python:
        metadata += f"Requires-Python: {requires_python}\n"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr(f"{name}-{version}.dist-info/METADATA", metadata)
    return path


def put(folder: Path, name: str, version: str, tag: str, files: dict[str, bytes]) -> Path:
    """Write one wheel; `files` beside its own metadata."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.10\n"
    wheel = f"Wheel-Version: 1.0\nGenerator: fake\nRoot-Is-Purelib: true\nTag: {tag}\n\n"
    path = folder / f"{name}-{version}-{tag}.whl"
    own = {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": wheel.encode()}
    archive.write(path, {**own, **files}, info)
    return path


def plain(folder: Path, version: str = "0.1.0") -> Path:
    """The wheel of the project itself."""
    files = {"flashvar/__init__.py": f"__version__ = '{version}'\n".encode()}
    return put(folder, "flashvar", version, "py3-none-any", files)


def binary(folder: Path, said: Manifest, platform: str = PLATFORM) -> Path:
    """The wheel of the binary that a manifest describes, with an SBOM; no machine code."""
    package = said.distribution.replace("-", "_")
    files = {
        f"{package}/{said.library.file}": b"\x7fELF",
        f"{package}/manifest.json": said.to_json().encode(),
        f"{package}-{said.version}.dist-info/sboms/{said.distribution}.cdx.json": b"{}",
    }
    return put(folder, package, said.version, f"py3-none-{platform}", files)
