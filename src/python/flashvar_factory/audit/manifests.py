"""Pairs the libraries of a wheel with the manifests that describe them."""

from __future__ import annotations

from collections.abc import Iterator

from flashvar.binaries import manifest
from flashvar.binaries.manifest import Manifest
from flashvar.errors import ManifestError
from flashvar_factory.audit.facts import Library, Wheel


def manifests(wheel: Wheel) -> dict[str, Manifest | ManifestError]:
    """Every manifest, or what is wrong with it, by its folder."""
    found: dict[str, Manifest | ManifestError] = {}
    for folder, text in wheel.manifests.items():
        try:
            found[folder] = manifest.parse(text)
        except ManifestError as error:
            found[folder] = error
    return found


def pairs(wheel: Wheel) -> Iterator[tuple[Library, Manifest]]:
    """Every library that has a manifest beside it which can be read, with it."""
    found = manifests(wheel)
    for library in wheel.libraries:
        described = found.get(library.folder)
        if isinstance(described, Manifest):
            yield library, described
