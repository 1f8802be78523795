"""A package index that stands for PyPI: what this environment has installed, as wheels of itself.

A wheel there holds no code but the way to this environment, and its distribution's entry points.
"""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path

import fake_wheels
from packaging.utils import canonicalize_name
from packaging.version import Version

from flashvar_factory import index

OURS = frozenset({"flashvar", "flashvar-factory"})


def write(folder: Path, *empty: tuple[str, str]) -> str:
    """Write the wheels, and `empty` ones of a name and a version; the index's address."""
    # In front, for what reads its own metadata, which a wheel here has not.
    line = "import sys; here = {!r}; here in sys.path or sys.path.insert(0, here)\n"
    here = line.format(sysconfig.get_path("purelib")).encode()
    found = {canonicalize_name(one.name): one for one in metadata.distributions()}
    for name, one in found.items():
        if name in OURS:
            continue
        stem, version = name.replace("-", "_"), Version(one.version).public
        entries = one.read_text("entry_points.txt") or ""
        files = {
            f"{stem}.pth": here,
            f"{stem}-{version}.dist-info/entry_points.txt": entries.encode(),
        }
        fake_wheels.put(folder / "wheels", stem, version, "py3-none-any", files)
    for name, version in empty:
        fake_wheels.put(folder / "wheels", name.replace("-", "_"), version, "py3-none-any", {})
    index.write(folder / "wheels", folder / "site")
    return f"{(folder / 'site').as_uri()}/"
