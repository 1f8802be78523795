"""Gathers the facts of this machine that selection depends on, once per process.

The module makes no decisions, and does not raise on machines without a GPU or without torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final

from flashvar.machine import broken_torch, distributions, driver

# Every device gives a block this much without opt-in; used where the device reports nothing else.
_SHARED_MEMORY_WITHOUT_OPTIN: Final = 48 * 1024
_TRITON_DISTRIBUTIONS: Final = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm")


@dataclass(frozen=True)
class Device:
    """One CUDA (or ROCm) device, with torch's index."""

    index: int
    name: str
    capability: tuple[int, int]
    shared_memory: int  # bytes that a block may opt in to
    multiprocessors: int
    memory: int  # bytes
    tegra: bool = False  # the integrated GPU of a Jetson


@dataclass(frozen=True)
class System:
    """Devices and software of one machine; None means not present."""

    devices: tuple[Device, ...] = ()
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA version the driver supports
    driver_display: str | None = None  # e.g. "580.82.07"
    torch: str | None = None
    torch_cuda: str | None = None  # the CUDA version torch was compiled with
    torch_hip: str | None = None  # the ROCm version torch was compiled with
    triton: str | None = None
    compiler: str | None = None  # the C compiler that Triton would call
    python_headers: str | None = None  # the folder of Python.h, which Triton's launcher includes
    triton_cache: str | None = None  # Triton's cache folder; None: it cannot be written
    interpreted: bool = False  # Triton runs kernels in Python, on CPU tensors: TRITON_INTERPRET
    python: str = ""
    platform: str = ""  # as in a wheel tag, e.g. "linux_x86_64"
    problem: str | None = None  # why torch sees no device, in torch's words
    torch_repair: str | None = None  # what makes a torch work that is there but fails on import
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, possibly ""

    def device(self, index: int) -> Device | None:
        """The device that torch calls `cuda:index`; None when it is not visible."""
        return next((device for device in self.devices if device.index == index), None)


@cache
def gather() -> System:
    """The facts of this machine, gathered once per process.

    Imports torch and queries its devices, which initializes CUDA but makes no context.
    """
    torch, devices, problem, fix = _ask_torch()
    version = getattr(torch, "version", None)
    return System(
        devices=devices,
        driver_cuda=driver.cuda_version(),
        driver_display=driver.display_version(),
        torch=None if torch is None else str(torch.__version__),
        torch_cuda=getattr(version, "cuda", None),
        torch_hip=getattr(version, "hip", None),
        triton=_triton_version(),
        compiler=find_compiler(),
        python_headers=_python_headers(),
        triton_cache=_triton_cache(),
        interpreted=_interpreted(),
        python=platform.python_version(),
        platform=platform_tag(),
        problem=problem,
        torch_repair=fix,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def gather_for_cpu() -> System:
    """The facts for CPU tensors. Queries no device: that could fail in a forked worker."""
    return System(triton=_triton_version(), interpreted=_interpreted())


def _ask_torch() -> tuple[Any, tuple[Device, ...], str | None, str | None]:
    """The torch module or None, its devices, its first warning or error, and `torch_repair`."""
    hanging = broken_torch.why_import_hangs()
    if hanging is not None:
        return None, (), f"torch cannot be imported: {hanging[0]}", hanging[1]
    try:
        torch = import_module("torch")
    except Exception as error:  # a broken torch raises more than ImportError
        why, fix = broken_torch.explain(error)
        return None, (), f"torch cannot be imported: {why}", fix
    if not hasattr(torch, "__version__"):  # Python imports any folder of that name as a package
        where = ", ".join(map(str, getattr(torch, "__path__", ["an unknown place"])))
        return None, (), f"torch is not installed, a folder of its name is left over: {where}", None
    # With an old driver torch warns and reports no device; the warning is the reason to show.
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        try:
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            devices = tuple(_ask_device(torch, index) for index in range(count))
        except Exception as error:  # e.g. CUDA in a forked child, or a device that fell off the bus
            return torch, (), f"torch cannot use its devices: {error}", None
    return torch, devices, str(complaints[0].message) if complaints else None, None


def _ask_device(torch: Any, index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    shared_memory = (
        getattr(properties, "shared_memory_per_block_optin", None)
        or driver.shared_memory_per_block(index)
        or getattr(properties, "shared_memory_per_block", None)
        or _SHARED_MEMORY_WITHOUT_OPTIN
    )
    return Device(
        index=index,
        name=str(properties.name),
        capability=(properties.major, properties.minor),
        shared_memory=shared_memory,
        multiprocessors=properties.multi_processor_count,
        memory=properties.total_memory,
        tegra=bool(getattr(properties, "is_integrated", False)) and is_tegra(),
    )


def platform_tag() -> str:
    """This platform, as in wheel tags and manifests, e.g. "linux_x86_64"."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def is_tegra(root: Path = Path("/")) -> bool:
    """Whether the machine is a Jetson, whose GPU runs code of exactly its own capability."""
    if (root / "etc/nv_tegra_release").exists():
        return True
    try:
        return b"nvidia,tegra" in (root / "proc/device-tree/compatible").read_bytes()
    except OSError:
        return False


def find_compiler() -> str | None:
    """The C compiler that Triton would call: $CC, else gcc, else clang; never plain cc."""
    named = os.environ.get("CC")
    if named is not None:
        return shutil.which(named)
    return shutil.which("gcc") or shutil.which("clang")


def _python_headers() -> str | None:
    # Debian's default scheme points to /usr/local, which has no headers; Triton corrects it too.
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    folder = Path(sysconfig.get_paths(scheme=scheme)["include"])
    return str(folder) if (folder / "Python.h").is_file() else None


def _triton_cache() -> str | None:
    """The folder if it is writable, or if it is filled already, as in a read-only image."""
    try:
        named, home = (os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TRITON_HOME"))
        if named == "":  # Triton raises an error at the first kernel
            return None
        base = Path("~").expanduser() if home is None else Path(home)  # "" is the current folder
        folder = base / ".triton" / "cache" if named is None else Path(named)
        existing = next(one for one in (folder, *folder.parents) if one.exists())
        filled = existing == folder and any(folder.iterdir())
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return str(folder) if filled or os.access(existing, os.W_OK | os.X_OK) else None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


def _triton_version() -> str | None:
    """Triton's version from its metadata: importing it would cost a second."""
    try:
        if util.find_spec("triton") is None:
            return None
    except (ImportError, ValueError):  # ValueError: blocked by None in sys.modules
        return None
    for name in _TRITON_DISTRIBUTIONS:
        found = distributions.find(name)
        if found is not None:
            return distributions.fields(found)["Version"] or "unknown"
    return "unknown"
