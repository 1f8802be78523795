"""The error for an integration whose package is missing, too old, or cannot be imported."""

from __future__ import annotations

from importlib import metadata

from flashvar.errors import IntegrationError

__all__ = ["unmet"]


def unmet(package: str, oldest: str, why: str) -> IntegrationError:
    """The error with the version needed, the version found, and the reason."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "none"
    return IntegrationError(
        f"register() needs {package} {oldest} or newer, found {found} ({why}): "
        f"pip install --upgrade '{package}>={oldest}'"
    )
