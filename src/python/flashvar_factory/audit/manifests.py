"""Pairs the libraries of a wheel with the manifests that describe them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from flashvar.binaries.manifest import FILE_NAME, Manifest, parse
from flashvar.errors import ManifestError
from flashvar_factory.audit.facts import Library, Wheel
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import json_text


def manifests(wheel: Wheel) -> dict[str, Manifest | ManifestError]:
    """Every manifest, or what is wrong with it, by its folder."""
    return {folder: _parsed(text) for folder, text in wheel.manifests.items()}


@lru_cache(maxsize=8)  # every check asks; a wheel of the factory has one
def _parsed(text: str) -> Manifest | ManifestError:
    try:
        manifest = parse(text)
        json_text.parse(text.encode(), FILE_NAME)  # no NaN, no infinities
    except ManifestError as error:
        return error
    except PackagingError as error:
        return ManifestError(str(error))
    return manifest


def pairs(wheel: Wheel) -> Iterator[tuple[Library, Manifest]]:
    """Every library that has a manifest beside it which can be read, with it."""
    found = manifests(wheel)
    for library in wheel.libraries:
        manifest = found.get(library.folder)
        if isinstance(manifest, Manifest):
            yield library, manifest
