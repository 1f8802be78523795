"""Attention kernels for PyTorch: compiled for your GPU, in Triton, and a reference for the CPU.

Importing this package imports neither torch nor triton and touches no device; public names load on
first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from flashvar import ops
from flashvar._version import __version__

if TYPE_CHECKING:
    from flashvar.errors import (
        BackendUnavailableError,
        BinaryError,
        ConfigurationError,
        DamagedWheelError,
        DeviceError,
        DriverTooOldError,
        DtypeError,
        FlashvarError,
        InstallError,
        IntegrationError,
        InvalidInputError,
        LayoutError,
        ManifestError,
        NotProvidedError,
        NoWheelForGpuError,
        ShapeError,
        WheelNotFoundError,
    )
    from flashvar.ops import *  # noqa: F403

__all__ = [
    "BackendUnavailableError",
    "BinaryError",
    "ConfigurationError",
    "DamagedWheelError",
    "DeviceError",
    "DriverTooOldError",
    "DtypeError",
    "FlashvarError",
    "InstallError",
    "IntegrationError",
    "InvalidInputError",
    "LayoutError",
    "ManifestError",
    "NoWheelForGpuError",
    "NotProvidedError",
    "ShapeError",
    "WheelNotFoundError",
    "__version__",
]
__all__ += ops.__all__

if os.environ.get("FLASHVAR_LOG"):
    importlib.import_module("flashvar.log")


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562) and keep it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = ops.HOMES.get(name, "flashvar.errors")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"flashvar.{name} needs torch, found none: pip install torch"
        raise ModuleNotFoundError(message, name="torch") from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *__all__})
