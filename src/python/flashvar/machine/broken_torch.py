"""Explains why torch fails on import: often another package is broken.

Torch reads the entry points of every installed package, and loads those of the group
`torch.backends`. If one cannot be read or loaded, the import of torch fails with an error that does
not name the package. A named pipe makes the import wait forever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import metadata, util
from typing import Final

from flashvar.machine import distributions

_GROUP: Final = "torch.backends"
_FILE: Final = "entry_points.txt"
_AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def why_import_hangs() -> tuple[str, str] | None:
    """Why an import of torch would not end, and what repairs that; None if it ends."""
    if "torch" in sys.modules or util.find_spec("torch") is None:
        return None
    return _broken_entry_points(lambda package: distributions.obstacle(package, _FILE))


def explain(error: Exception) -> tuple[str, str | None]:
    """What is broken and where, and what repairs it; None: torch is not installed."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return str(error), None
    return (
        _broken_entry_points(_parse_error)
        or _backend_that_failed(error)
        or (str(error), "pip install --force-reinstall torch")
    )


def _broken_entry_points(
    flaw: Callable[[metadata.Distribution], str | None],
) -> tuple[str, str] | None:
    """The first package whose entry points have a flaw, if torch reads them at all."""
    if os.environ.get(_AUTOLOAD) == "0":
        return None
    for package in metadata.distributions():
        found = flaw(package)
        if found is not None:
            name = _name(package)
            where = getattr(package, "_path", None)  # has no public name
            file = _FILE if where is None else str(where / _FILE)
            why = f"it reads the entry points of every package, and those of {name} are broken"
            return f"{why} ({found}): {file}", f"reinstall {name}, or remove it"
    return None


def _parse_error(package: metadata.Distribution) -> str | None:
    try:
        package.entry_points  # noqa: B018  reading parses them
    except Exception as error:  # whatever the parser stumbles over
        return str(error)
    return None


def _backend_that_failed(error: Exception) -> tuple[str, str] | None:
    if "backend extension: " not in str(error):
        return None
    for point in metadata.entry_points(group=_GROUP):
        if f"backend extension: {point.name}." in str(error):
            name = "an unknown package" if point.dist is None else _name(point.dist)
            why = f"the backend {point.name} of {name} cannot be loaded ({error.__cause__})"
            fix = f"reinstall or remove {name}, or export {_AUTOLOAD}=0"
            return why, fix
    return None


def _name(package: metadata.Distribution) -> str:
    return distributions.fields(package)["Name"] or "a package without a name"
