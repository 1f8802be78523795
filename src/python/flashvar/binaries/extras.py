"""Which binaries can be had from pip: the extras of the installed flashvar, and where they serve.

An extra of another platform installs nothing, without a word from pip: advice must not name it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from flashvar.binaries.variant import Architecture

# Of the requirements that flashvar_factory.config.extras writes: all are for Linux.
_EXTRA: Final = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
_MACHINE: Final = re.compile(r"""\bplatform_machine\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True)
class Extras:
    """Extras of architectures, e.g. "smXY"; none at all where flashvar runs from bare sources."""

    here: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()  # made for other platforms alone


NO_EXTRAS: Final = Extras()


def of_installed(platform: str) -> Extras:
    """Those of the installed flashvar, for a platform such as "linux_x86_64"."""
    try:
        stated = metadata.metadata("flashvar")
        provided = stated.get_all("Provides-Extra") or []
        required = stated.get_all("Requires-Dist") or []
    except (metadata.PackageNotFoundError, UnicodeDecodeError, AttributeError):
        # It is not installed, or its METADATA is damaged or missing.
        return NO_EXTRAS
    return read(provided, required, platform)


def read(extras: Iterable[str], requirements: Iterable[str], platform: str) -> Extras:
    """The architectures among extras, told apart by the markers of the requirements."""
    served: dict[str, set[str]] = {}
    for requirement in requirements:
        platforms = {f"linux_{machine}" for machine in _MACHINE.findall(requirement)}
        for extra in _EXTRA.findall(requirement):
            served.setdefault(extra, set()).update(platforms)
    every = frozenset(extra for extra in extras if _is_architecture(extra))
    # Without a marker it is for every platform.
    here = frozenset(extra for extra in every if platform in (served.get(extra) or {platform}))
    return Extras(here, every - here)


def _is_architecture(extra: str) -> bool:
    try:
        return Architecture.parse(extra).extra == extra
    except ValueError:
        return False
