"""The error for an integration whose package is missing, too old, or cannot be imported."""

from __future__ import annotations

from flashvar.errors import IntegrationError
from flashvar.machine import distributions

__all__ = ["unmet"]


def unmet(package: str, oldest: str, why: str) -> IntegrationError:
    """The error with the version needed, the version found, and the reason."""
    installed = distributions.find(package)
    found = "none"
    if installed is not None:
        found = distributions.fields(installed)["Version"] or "an unknown version"
    return IntegrationError(
        f"register() needs {package} {oldest} or newer, found {found} ({why}): "
        f"pip install --upgrade '{package}>={oldest}'"
    )
