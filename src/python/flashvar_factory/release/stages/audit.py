"""Check that every file of the release is what it claims to be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from flashvar_factory import audit
from flashvar_factory.audit import expectations, source_checks
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.release.pipeline import Release, files_of, wheels_of
from flashvar_factory.release.steps import Outcome, Step, digests


def steps(release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
    """One step per file."""
    for file in files_of(done):
        if file.name.endswith(".tar.gz"):
            yield Step(f"audit/{file.name}", digests([file]), partial(_audit_sdist, release, file))
    for wheel in wheels_of(done):
        yield Step(f"audit/{wheel.stem}", digests([wheel]), partial(_audit, release, wheel))


def _expected(release: Release) -> Expectations:
    """The commit, and its sources: the checkout is clean."""
    return expectations.of(release.config, root=release.root, revision=release.revision)


def _audit(release: Release, wheel: Path) -> Outcome:
    report = audit.audit(wheel, _expected(release))
    if not report.passed:
        print(report.text())
    audit.require([report])
    found = ", ".join(report.architectures) or "no device code"
    summary = f"passed {len(report.checks)} checks; {found}"
    return Outcome(summary, facts={"file": wheel.name, **json.loads(report.to_json())})


def _audit_sdist(release: Release, file: Path) -> Outcome:
    audit.require_sdists({file: source_checks.audit_sdist(file, _expected(release))})
    return Outcome("its files are those of the commit", facts={"file": file.name})
