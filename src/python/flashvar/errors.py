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


class ToolchainError(FlashvarError):
    """A compiler or a build tool is missing or too old."""

    exit_code = 3


class CrossToolchainError(ToolchainError):
    """What compiling for another processor needs is missing."""

    exit_code = 7


class BuildError(FlashvarError):
    """Compiling or linking a binary failed."""

    exit_code = 4


class PackagingError(FlashvarError):
    """A wheel, an index or an audit of them failed."""

    exit_code = 5


class AuditError(PackagingError):
    """A wheel is not what it says it is, or may not be released."""

    exit_code = 6


class CheckoutError(FlashvarError):
    """The checkout is not one that a release is made from."""

    exit_code = 8


class ReleaseError(PackagingError):
    """The files of a release do not make a whole: one lacks, is strange, or does not fit."""

    exit_code = 9


class ReproducibilityError(PackagingError):
    """Two builds of the same sources differ."""

    exit_code = 10


class SmokeError(PackagingError):
    """Wheels do not install, or do not work where they are installed."""

    exit_code = 11


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


class ManifestError(FlashvarError):
    """A manifest is missing, unreadable, or says something that it may not say."""


class BinaryError(FlashvarError, RuntimeError):
    """A shared library was refused at load, or a launch in it failed."""
