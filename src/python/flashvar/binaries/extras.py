"""Available extras: the architectures whose binaries pip can install, by platform.

For an extra of another platform pip installs nothing and reports nothing, so no command may name
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from flashvar._version import __version__
from flashvar.binaries.kinds import BinaryKind
from flashvar.machine import distributions

# Markers of the requirements that flashvar_factory.config.extras writes, all for Linux, and
# `flashvar-sm89 ==0.1.0 ; marker`, as build backends write them.
_EXTRA: Final = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
_MACHINE: Final = re.compile(r"""\bplatform_machine\s*==\s*['"]([^'"]+)['"]""")
_PINNED: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*\(?==\s*([^;,\s)]+)")


class Pin(NamedTuple):
    """What an extra installs: exactly one version of a distribution."""

    extra: str
    distribution: str
    version: str
    platforms: frozenset[str]  # such as "linux_x86_64"; empty: every platform


@dataclass(frozen=True)
class Extras:
    """Extras of binaries, "smXY" or "smXY-cuN"; empty where flashvar runs from a source tree."""

    here: frozenset[str] = frozenset()  # for this platform
    elsewhere: frozenset[str] = frozenset()  # only for other platforms


NO_EXTRAS: Final = Extras()


def of_installed(platform: str) -> Extras:
    """The extras of the installed flashvar, for a platform such as "linux_x86_64"."""
    installed = distributions.find("flashvar", __version__)
    if installed is None:
        return NO_EXTRAS
    fields = distributions.fields(installed)
    provided, required = (
        fields.get_all(name) or [] for name in ("Provides-Extra", "Requires-Dist")
    )
    return read(provided, required, platform)


def read(extras: Iterable[str], requirements: Iterable[str], platform: str) -> Extras:
    """The binaries among extras; the markers of the requirements give their platforms.

    Of extras that install the same distribution the lowest architecture names the binary.
    """
    platforms: dict[str, set[str]] = {}
    installed: dict[str, str] = {}
    for pin in pins(requirements):
        platforms.setdefault(pin.extra, set()).update(pin.platforms)
        installed[pin.extra] = pin.distribution
    binaries = sorted(filter(_names_binary, extras), key=BinaryKind.parse, reverse=True)
    every = frozenset({installed.get(extra, extra): extra for extra in binaries}.values())
    # An extra without a marker is for every platform.
    here = frozenset(extra for extra in every if platform in (platforms.get(extra) or {platform}))
    return Extras(here, every - here)


def pins(requirements: Iterable[str]) -> Iterator[Pin]:
    """What extras install, from the lines Requires-Dist of a distribution's metadata."""
    for requirement in requirements:
        pinned = _PINNED.match(requirement)
        if pinned is not None:
            platforms = frozenset(f"linux_{name}" for name in _MACHINE.findall(requirement))
            for extra in _EXTRA.findall(requirement):
                yield Pin(extra, pinned[1], pinned[2], platforms)


def _names_binary(extra: str) -> bool:
    try:
        return BinaryKind.parse(extra).extra == extra
    except ValueError:
        return False
