"""Errors of building, checking and releasing wheels, one class per kind.

`flashvar.errors` has those of the runtime, and says what a message is made of.
"""

from __future__ import annotations

from flashvar.errors import FlashvarError


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
    """The files are not one complete release: one is missing, unexpected or inconsistent."""

    exit_code = 9


class ReproducibilityError(PackagingError):
    """Two builds of the same sources differ."""

    exit_code = 10


class SmokeError(PackagingError):
    """Wheels do not install, or do not work where they are installed."""

    exit_code = 11
