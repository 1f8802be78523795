"""Queries of the NVIDIA driver about itself and its devices; they make no CUDA context."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path

_VERSION_FILE = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version the driver serves (cuDriverGetVersion); None without a driver."""
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


def shared_memory_per_block(device: int) -> int | None:
    """Bytes of shared memory that a block may opt in to; None without a working driver."""
    library = _library()
    value, handle = ctypes.c_int(0), ctypes.c_int(0)
    if library is None or library.cuDeviceGet(ctypes.byref(handle), device) != 0:
        return None
    status = library.cuDeviceGetAttribute(
        ctypes.byref(value), _SHARED_MEMORY_PER_BLOCK_OPTIN, handle
    )
    return value.value if status == 0 else None
