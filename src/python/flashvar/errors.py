"""What can go wrong, one class per kind.

Messages have three beats: what was expected, what was found, what to do. `exit_code` is what a
command line ends with when the error reaches it.
"""

from __future__ import annotations

from typing import ClassVar


class FlashvarError(Exception):
    """Base of every error that flashvar raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigurationError(FlashvarError):
    """`variants.toml`, a word of a selection or an environment variable is not valid."""

    exit_code = 2


class InvalidInputError(FlashvarError, ValueError):
    """An argument of an op is not what the op takes."""


class ShapeError(InvalidInputError):
    """Rank, head counts, head dim or sequence lengths do not fit together."""


class DtypeError(InvalidInputError):
    """A dtype that no backend takes, or dtypes that differ between arguments."""


class DeviceError(InvalidInputError):
    """Arguments on different devices, or on a kind of device that nothing serves."""


class LayoutError(InvalidInputError):
    """Strides that the kernels cannot read, or an unknown layout name."""


class BackendUnavailableError(FlashvarError, RuntimeError):
    """The named backend cannot serve the request, or no backend can."""


class IntegrationError(FlashvarError, ImportError):
    """The package that flashvar is to be registered in is missing or too old."""


class NotServedError(FlashvarError, ModuleNotFoundError):
    """A part of another project that flashvar's stand-in for it does not have."""


class ManifestError(FlashvarError):
    """A manifest is missing, unreadable, or says something that it may not say."""


class BinaryError(FlashvarError, RuntimeError):
    """A shared library was refused at load, or a launch in it failed."""
