"""Install from the index into fresh environments of every Python, and call what is there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial

from flashvar_factory.release import smoke
from flashvar_factory.release.pipeline import Release, files_of
from flashvar_factory.release.pythons import Python, require
from flashvar_factory.release.stages import index
from flashvar_factory.release.steps import Outcome, Step, digests


def steps(release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
    """One step for each Python."""
    require(release.pythons)
    for python in release.pythons:
        inputs = {**digests(files_of(done)), "python": str(python.executable)}
        yield Step(f"smoke/{python.tag}", inputs, partial(_install, release, python))


def _install(release: Release, python: Python) -> Outcome:
    report = smoke.run_with_index(
        release.wheels,
        index.site(release),
        root=release.root,
        config=release.config,
        pythons=[python],
    )
    return Outcome(
        f"{len(report.checks)} environments are fine",
        facts={"checks": json.loads(report.to_json())["checks"]},
    )
