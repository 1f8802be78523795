"""Queries of the NVIDIA driver about itself and its devices; they make no CUDA context."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

# CUDA version -> the driver branch that first reports it (CUDA Toolkit release notes, table 3).
BRANCHES: Final = {
    (12, 0): "525",
    (12, 8): "570",
    (12, 9): "575",
    (13, 0): "580",
    (13, 1): "590",
}

_VERSION_FILE = Path("/proc/driver/nvidia/version")
# CUdevice_attribute of the driver API (cuda.h).
_INTEGRATED = 18
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
_LONGEST_NAME = 256


@dataclass(frozen=True)
class Gpu:
    """One device, as the driver reports it to a process that has no torch."""

    name: str
    capability: tuple[int, int]
    integrated: bool = False


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version the driver supports (cuDriverGetVersion); None without a driver."""
    library = _library()
    version = ctypes.c_int(0)
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return decode_version(version.value) if version.value > 0 else None


def decode_version(number: int) -> tuple[int, int]:
    """CUDA's 1000 * major + 10 * minor as (major, minor)."""
    return number // 1000, number % 1000 // 10


def display_version(path: Path = _VERSION_FILE) -> str | None:
    """The driver's own version, e.g. "580.82.07"; None if the kernel module does not report it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\b[0-9]{3,}\.[0-9]+(?:\.[0-9]+)?\b", text)
    return match[0] if match else None


def gpus() -> tuple[Gpu, ...]:
    """The devices that the driver shows to this process, in its order; () without a driver."""
    library = _library()
    count = ctypes.c_int(0)
    if (
        library is None
        or library.cuInit(0) != 0
        or library.cuDeviceGetCount(ctypes.byref(count)) != 0
    ):
        return ()
    return tuple(_gpu(library, index) for index in range(count.value))


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    name = ctypes.create_string_buffer(_LONGEST_NAME)
    library.cuDeviceGetName(name, _LONGEST_NAME, index)
    major, minor, integrated = (
        _attribute(number, index) or 0
        for number in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _INTEGRATED)
    )
    return Gpu(name.value.decode(errors="replace"), (major, minor), bool(integrated))


def shared_memory_per_block(device: int) -> int | None:
    """Bytes of shared memory that a block may opt in to; None without a working driver."""
    return _attribute(_SHARED_MEMORY_PER_BLOCK_OPTIN, device)


def _attribute(number: int, device: int) -> int | None:
    """An attribute of a device; None without a working driver."""
    library = _library()
    value, handle = ctypes.c_int(0), ctypes.c_int(0)
    if library is None or library.cuDeviceGet(ctypes.byref(handle), device) != 0:
        return None
    status = library.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
    return value.value if status == 0 else None
