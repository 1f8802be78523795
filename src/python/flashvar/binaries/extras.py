"""Available extras: the architectures whose binaries pip can install, by platform.

For an extra of another platform pip installs nothing and reports nothing, so suggestions must not
name it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from flashvar.binaries.variant import Architecture

# Markers of the requirements that flashvar_factory.config.extras writes, all for Linux.
EXTRA: Final = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
MACHINE: Final = re.compile(r"""\bplatform_machine\s*==\s*['"]([^'"]+)['"]""")


@dataclass(frozen=True)
class Extras:
    """Extras of architectures, e.g. "smXY"; empty where flashvar runs from a source tree."""

    here: frozenset[str] = frozenset()  # for this platform
    elsewhere: frozenset[str] = frozenset()  # only for other platforms


NO_EXTRAS: Final = Extras()


def of_installed(platform: str) -> Extras:
    """The extras of the installed flashvar, for a platform such as "linux_x86_64"."""
    try:
        installed = metadata.metadata("flashvar")
        provided = installed.get_all("Provides-Extra") or []
        required = installed.get_all("Requires-Dist") or []
    except (metadata.PackageNotFoundError, UnicodeDecodeError, AttributeError):
        # flashvar is not installed, or its METADATA is damaged or missing.
        return NO_EXTRAS
    return read(provided, required, platform)


def read(extras: Iterable[str], requirements: Iterable[str], platform: str) -> Extras:
    """The architectures among extras; the markers of the requirements give their platforms."""
    served: dict[str, set[str]] = {}
    for requirement in requirements:
        platforms = {f"linux_{machine}" for machine in MACHINE.findall(requirement)}
        for extra in EXTRA.findall(requirement):
            served.setdefault(extra, set()).update(platforms)
    every = frozenset(extra for extra in extras if _is_architecture(extra))
    # An extra without a marker is for every platform.
    here = frozenset(extra for extra in every if platform in (served.get(extra) or {platform}))
    return Extras(here, every - here)


def _is_architecture(extra: str) -> bool:
    try:
        return Architecture.parse(extra).extra == extra
    except ValueError:
        return False
