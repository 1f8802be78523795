"""Explains why torch fails on import: often another package is broken.

Torch reads the entry points of every installed package, and loads those of the group
`torch.backends`. One that cannot be read or loaded makes the import of torch fail, with an error
that does not name the package.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

_GROUP: Final = "torch.backends"


def explain(error: Exception) -> tuple[str, str | None]:
    """What is broken and where, and what repairs it; None: torch is not installed."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return str(error), None
    return (
        _unreadable_entry_points()
        or _backend_that_failed(error)
        or (str(error), "pip install --force-reinstall torch")
    )


def _unreadable_entry_points() -> tuple[str, str] | None:
    for package in metadata.distributions():
        try:
            package.entry_points  # noqa: B018  reading parses them
        except Exception as error:  # whatever the parser stumbles over
            name = _name(package)
            where = getattr(package, "_path", None)  # has no public name
            file = "entry_points.txt" if where is None else str(where / "entry_points.txt")
            why = f"it reads the entry points of every package, and those of {name} are broken"
            return f"{why} ({error}): {file}", f"reinstall {name}, or remove it"
    return None


def _backend_that_failed(error: Exception) -> tuple[str, str] | None:
    for point in metadata.entry_points(group=_GROUP):
        if f"backend extension: {point.name}." in str(error):
            name = "an unknown package" if point.dist is None else _name(point.dist)
            why = f"the backend {point.name} of {name} cannot be loaded ({error.__cause__})"
            fix = f"reinstall or remove {name}, or export TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            return why, fix
    return None


def _name(package: metadata.Distribution) -> str:
    try:
        return str(package.metadata["Name"])
    except Exception:  # metadata that cannot be read either
        return "a package without a name"
