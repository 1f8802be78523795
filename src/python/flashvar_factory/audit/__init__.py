"""Audits wheels: gathers facts, then runs one table of checks. Needs no CUDA toolkit.

General checks apply to every wheel. Those of the factory's own wheels apply where the wheel, or
variants.toml, says that it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from flashvar_factory.audit import (
    archive_checks,
    device_checks,
    dynamic_checks,
    facts,
    kernel_checks,
    library_checks,
    loading_checks,
    manifest_checks,
    member_checks,
    metadata_checks,
    platform_checks,
    relocation_checks,
    sbom_checks,
    segment_checks,
    source_checks,
    variant_checks,
)
from flashvar_factory.audit.expectations import BUDGET, Expectations
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.audit.ledger import ledger
from flashvar_factory.audit.report import Report
from flashvar_factory.errors import AuditError

Check = Callable[[Wheel, Expectations], Iterator[Finding]]

_LISTED: Final = 200  # errors that a check lists of one wheel


def budget(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The wheel is not larger than the budget."""
    limit = _limit(wheel, expected)
    if limit is not None and wheel.size > limit:
        yield Finding(
            "budget",
            wheel.path.name,
            f"expected at most {limit:,} bytes, found {wheel.size:,}; the report lists the bytes "
            "of each kernel",
        )


OF_EVERY_WHEEL: Final[tuple[Check, ...]] = (
    archive_checks.archive,
    archive_checks.record,
    platform_checks.platform,
    budget,
)
OF_THE_PROJECT: Final[tuple[Check, ...]] = (
    member_checks.modes,
    metadata_checks.metadata,
    metadata_checks.wheel_file,
    source_checks.sources,
    source_checks.declared,
    variant_checks.variant,
)
OF_THE_FACTORY: Final[tuple[Check, ...]] = (
    member_checks.members,
    member_checks.modes,
    member_checks.licenses,
    metadata_checks.metadata,
    metadata_checks.wheel_file,
    metadata_checks.entries,
    sbom_checks.sbom,
    variant_checks.variant,
    manifest_checks.manifest,
    manifest_checks.derived,
    kernel_checks.kernels,
    loading_checks.loading,
    segment_checks.segments,
    dynamic_checks.dynamic_section,
    relocation_checks.relocations,
    device_checks.architecture,
    device_checks.ptx,
    library_checks.exports,
    library_checks.dependencies,
)


def audit(path: Path, expected: Expectations | None = None) -> Report:
    """Check the wheel at `path`; PackagingError when there is no file of a wheel's name."""
    expected = expected or Expectations()
    wheel = facts.gather(path)
    checks = OF_EVERY_WHEEL
    if expected.is_projects_own(wheel.name):
        checks += OF_THE_PROJECT
    if _is_binary_wheel(wheel, expected):
        checks += tuple(check for check in OF_THE_FACTORY if check not in checks)
    return Report(
        wheel=wheel,
        findings=tuple(_findings(wheel, expected, checks)),
        ledger=ledger(wheel),
        budget=_limit(wheel, expected),
        checks=tuple(check.__name__ for check in checks),
    )


def require(reports: Iterable[Report]) -> None:
    """AuditError that counts the errors of reports that were printed, if there is one."""
    _require({report.wheel.path: report.findings for report in reports})


def require_sdists(findings: Mapping[Path, Sequence[Finding]]) -> None:
    """AuditError that counts the errors of sdists, each printed, if there is one."""
    for path, found in findings.items():
        if found:
            print("\n".join([f"{path.name}:", *(f"  ERROR {finding}" for finding in found)]))
    _require(findings)


def _require(findings: Mapping[Path, Sequence[Finding]]) -> None:
    failed = [path.name for path, found in findings.items() if found]
    if failed:
        count = sum(map(len, findings.values()))
        names = ", ".join(failed)
        raise AuditError(f"expected {names} without errors, found errors: {count}, listed above")


def _findings(wheel: Wheel, expected: Expectations, checks: Iterable[Check]) -> Iterator[Finding]:
    """All findings; of an archive that is damaged or unpacks elsewhere, only that and the size."""
    unsafe = list(_first(archive_checks.archive, wheel, expected))
    yield from unsafe
    for check in checks:
        if not unsafe or check is budget:
            yield from _first(check, wheel, expected)


def _first(check: Check, wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The first findings of a check: a hostile file may have a million errors."""
    found = check(wheel, expected)
    yield from islice(found, _LISTED)
    if next(found, None) is not None:
        more = f"expected at most {_LISTED} errors of one kind to list, found more; fix these first"
        yield Finding(check.__name__, wheel.path.name, more)


def _is_binary_wheel(wheel: Wheel, expected: Expectations) -> bool:
    named = expected.architecture(wheel.name) is not None
    return named or bool(wheel.manifests) or bool(wheel.entry_points)


def _limit(wheel: Wheel, expected: Expectations) -> int | None:
    if expected.budget is None and _is_binary_wheel(wheel, expected):
        return BUDGET
    return expected.budget
