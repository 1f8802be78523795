"""Read the SBOM of every binary wheel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from flashvar_factory.build import sbom
from flashvar_factory.errors import PackagingError
from flashvar_factory.release import members
from flashvar_factory.release.pipeline import Release, wheels_of
from flashvar_factory.release.steps import Outcome, Step, digests


def steps(release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
    """One step per wheel that is for a platform."""
    for wheel in wheels_of(done):
        member = members.read(wheel)
        if member is not None and member.platform != members.ANY:
            yield Step(f"sbom/{wheel.stem}", digests([wheel]), partial(_read, wheel))


def _read(wheel: Path) -> Outcome:
    documents = sbom.read(wheel)
    if not documents:
        raise PackagingError(f"{wheel}: expected .dist-info/sboms/*.cdx.json, found none")
    components = [
        f"{one.name} {one.version}".strip()
        for text in documents.values()
        for one in sbom.components(text)
    ]
    return Outcome(
        f"{len(components)} components",
        facts={"file": wheel.name, "documents": sorted(documents), "components": components},
    )
