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
    """`variants.toml`, a selection argument or an environment variable is not valid."""

    exit_code = 2


class InvalidInputError(FlashvarError, ValueError):
    """An argument of an op is not supported."""


class ShapeError(InvalidInputError):
    """Ranks, sizes or sequence lengths do not fit together."""


class DtypeError(InvalidInputError):
    """A dtype that no backend supports, or dtypes that differ between arguments."""


class DeviceError(InvalidInputError):
    """Arguments on different devices, or on an unsupported kind of device."""


class LayoutError(InvalidInputError):
    """Strides that the kernels cannot read, or an unknown layout name."""


class BackendUnavailableError(FlashvarError, RuntimeError):
    """The named backend cannot serve the request, or no backend can."""


class IntegrationError(FlashvarError, ImportError):
    """The package to integrate with is missing or too old."""


class NotServedError(FlashvarError, ModuleNotFoundError):
    """A part of another project's API that flashvar's replacement does not have."""


class ManifestError(FlashvarError):
    """A manifest is missing, unreadable or not valid."""


class BinaryError(FlashvarError, RuntimeError):
    """A shared library was refused when it was loaded, or a launch failed."""
