"""The errors that flashvar raises, one class per kind.

Messages state what was expected, what was found and what to do. `exit_code` is the exit code of a
command that ends with the error.
"""

from __future__ import annotations

from typing import ClassVar


class FlashvarError(Exception):
    """Base of every error that flashvar raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigurationError(FlashvarError):
    """`variants.toml`, an argument of a command or an environment variable is not valid."""

    exit_code = 2


class InvalidInputError(FlashvarError, ValueError, RuntimeError):
    """An argument of an op is not supported.

    It is a ValueError, like Python's own, and a RuntimeError, like those of torch and of the
    packages that flashvar replaces.
    """


class ShapeError(InvalidInputError):
    """Ranks, sizes or sequence lengths do not fit together."""


class DtypeError(InvalidInputError):
    """A dtype that no backend supports, or dtypes that differ between arguments."""


class DeviceError(InvalidInputError):
    """Arguments on different devices, or on an unsupported kind of device."""


class LayoutError(InvalidInputError):
    """Strides that the kernels cannot read, or an unknown layout name."""


class BackendUnavailableError(FlashvarError, RuntimeError):
    """The named backend cannot run the call, or no backend can."""


class IntegrationError(FlashvarError, ImportError):
    """The package to integrate with is missing or too old."""


class NotProvidedError(FlashvarError, ModuleNotFoundError):
    """A part of another project's API that flashvar's replacement does not have."""


class ManifestError(FlashvarError):
    """A manifest is missing, unreadable or not valid.

    With FLASHVAR_STRICT=1 also: a binary has another version than flashvar.
    """


class BinaryError(FlashvarError, RuntimeError):
    """A shared library could not be loaded, or a launch failed."""


class InstallError(FlashvarError):
    """`flashvar install` cannot change this environment: incomplete, no installer, or in use."""

    exit_code = 12


class NoWheelForGpuError(InstallError):
    """No GPU was found, or no binary is made for the GPUs that were found."""

    exit_code = 13


class DriverTooOldError(InstallError):
    """The driver is too old for every binary that is made for the GPU."""

    exit_code = 14


class WheelNotFoundError(InstallError):
    """No source of wheels is known or answers, or the source does not have the wheel."""

    exit_code = 15


class DamagedWheelError(InstallError):
    """A wheel is not the one that its source lists, or is damaged or cut off."""

    exit_code = 16
