"""Makes development binaries part of this Python environment, and shows that they load."""

from __future__ import annotations

import ctypes
import json
import sysconfig
from pathlib import Path

from flashvar.binaries import manifest
from flashvar.errors import BinaryError
from flashvar_factory.configure import write_if_changed


def link_into_environment(site: Path, project: str) -> Path:
    """Put `site` on the path of this environment; the .pth file that does it."""
    path = Path(sysconfig.get_path("purelib"), f"{project}-dev.pth")
    write_if_changed(path, f"{site}\n")
    return path


def verify(package: Path) -> str:
    """Open the library of a built binary, as its manifest describes it; one line about it."""
    described = manifest.read(package / manifest.FILE_NAME)
    path = package / described.library.file
    try:
        library = ctypes.CDLL(str(path))
        abi = getattr(library, f"{described.project}_abi_version")
        info = getattr(library, f"{described.project}_build_info")
    except (OSError, AttributeError) as error:
        raise BinaryError(f"{path}: expected a library that loads, found: {error}") from error
    info.restype = ctypes.c_char_p
    said = json.loads(info().decode())
    if (abi(), said["architecture"]) != (described.abi, described.architecture.name):
        raise BinaryError(
            f"{path}: expected ABI {described.abi} for {described.architecture.name}, found ABI "
            f"{abi()} for {said['architecture']}; delete the build directory"
        )
    return (
        f"{path.name} loads: ABI {abi()}, {said['architecture']}, {said['version']}, "
        f"{len(described.kernels)} kernels, {described.library.bytes:,} bytes"
    )
