"""Make the wheel variants (experimental): beside the release, not part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from flashvar_factory.build import wheel
from flashvar_factory.release import variants
from flashvar_factory.release.pipeline import Release, wheels_of
from flashvar_factory.release.steps import Outcome, Step, digests


def steps(release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
    """One step, where the project has a wheel of its own to put binaries into."""
    if wheel.has_pure(release.root):
        yield Step("variants/wheels", digests(wheels_of(done)), partial(_write, release))


def _write(release: Release) -> Outcome:
    folder = release.folder / "variants"
    files = variants.write(release.wheels, folder, release.config.project.name)
    return Outcome(f"{len(files)} files", tuple(files))
