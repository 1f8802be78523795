"""Prove that every wheel is what it says it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from flashvar_factory import audit
from flashvar_factory.audit import expectations
from flashvar_factory.release.pipeline import Release, wheels_of
from flashvar_factory.release.steps import Outcome, Step, digests


def steps(release: Release, done: Mapping[str, Outcome]) -> Iterator[Step]:
    """One step per wheel."""
    for wheel in wheels_of(done):
        yield Step(f"audit/{wheel.stem}", digests([wheel]), partial(_audit, release, wheel))


def _audit(release: Release, wheel: Path) -> Outcome:
    report = audit.audit(wheel, expectations.of(release.config))
    if not report.passed:
        print(report.text())
    audit.require([report])
    found = ", ".join(report.architectures) or "no device code"
    verdict = f"passed {len(report.checks)} checks; {found}"
    return Outcome(verdict, facts={"file": wheel.name, **json.loads(report.to_json())})
