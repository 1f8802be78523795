"""Write the package index of the release, to install from over HTTP or as files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from flashvar_factory import index
from flashvar_factory.index import yanks
from flashvar_factory.release.pipeline import Release, files_of
from flashvar_factory.release.steps import Outcome, Step, digests


def site(release: Release) -> Path:
    """Where the index is."""
    return release.folder / "index"


def steps(release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
    """One step for all pages."""
    usual = release.root / yanks.FILE_NAME
    yanked = usual if usual.is_file() else None
    inputs = digests([*files_of(done), *([yanked] if yanked else [])])
    yield Step("index/pages", inputs, partial(_write, release, yanked))


def _write(release: Release, yanked: Path | None) -> Outcome:
    names = index.write(release.wheels, site(release), yanked=yanked, whole=False)
    pages = tuple(sorted(path for path in site(release).rglob("*") if path.is_file()))
    return Outcome(f"{len(names)} projects", pages, {"projects": names})
