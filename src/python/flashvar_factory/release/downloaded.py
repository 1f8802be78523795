"""Verifies wheels that were downloaded, without a network: every check says what it found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar.errors import ConfigurationError, FlashvarError, IntegrityError
from flashvar_factory import audit
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.build import sbom
from flashvar_factory.config import toml_table
from flashvar_factory.errors import AuditError
from flashvar_factory.index import simple_json
from flashvar_factory.release import attestations, published
from flashvar_factory.release.attestations import Publisher

CHECKS: Final = ("hash", "audit", "sbom", "attestation")
# What no file can say of itself.
BEYOND: Final = (
    "not checked, for it takes a network: that the index still lists the files and yanked none, "
    "and that the trust root of attestations is today's"
)


@dataclass(frozen=True)
class Outcome:
    """What one check found: nothing against the file, a fault, or that it could not be made."""

    check: str
    words: str
    fault: FlashvarError | None = None
    made: bool = True

    def __str__(self) -> str:
        state = "FAULT" if self.fault else "ok" if self.made else "not checked"
        return f"  {self.check:<12} {state}: {self.words}"


@dataclass(frozen=True)
class Trusted:
    """What files are compared with."""

    hashes: Mapping[str, str] | None  # SHA-256 by file name
    publisher: Publisher | None
    expected: Expectations


def listed(path: Path) -> dict[str, str]:
    """The SHA-256 of files by name: of a list as sha256sum writes it, or of an index's folder.

    Raises:
        ConfigurationError: the file is no such list, or the folder no index.
    """
    if path.is_dir():
        pages = sorted(path.glob(f"*/{simple_json.FILE_NAME}"))
        found = {
            name: digest
            for page in pages
            for name, digest in published.parse(page.read_bytes(), str(page)).items()
        }
    else:
        rows = [line.split() for line in toml_table.read(path).splitlines() if line]
        found = {Path(row[1].lstrip("*")).name: row[0].lower() for row in rows if _is_sum(row)}
        if len(found) != len(rows):
            found = {}
    if not found:
        raise ConfigurationError(
            f"--hashes {path}: expected lines of a SHA-256 and a file name, or the folder of an "
            "index made by this factory, found neither"
        )
    return found


def _is_sum(row: list[str]) -> bool:
    return len(row) == 2 and len(row[0]) == 64 and not set(row[0].lower()) - set("0123456789abcdef")


def verify(file: Path, trusted: Trusted) -> tuple[Outcome, ...]:
    """Make every check of a wheel that can be made here."""
    checks = {"hash": _hash, "audit": _audit, "sbom": _sbom, "attestation": _attestation}
    return tuple(outcome for check in CHECKS for outcome in checks[check](file, trusted))


def require(outcomes: Mapping[Path, tuple[Outcome, ...]], required: frozenset[str]) -> None:
    """Raise the first fault; a check that is required but was not made is one.

    Raises:
        IntegrityError: a file has other bytes, or another publisher; or that is not known.
        AuditError: a file is not what it says it is.
    """
    for file, found in outcomes.items():
        for one in found:
            if one.fault is not None:
                raise one.fault
            if one.check in required and not one.made:
                raise IntegrityError(f"{file.name}: expected its {one.check} checked: {one.words}")


def _hash(file: Path, trusted: Trusted) -> Iterator[Outcome]:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if trusted.hashes is None:
        yield Outcome("hash", f"{digest}; name what lists it with --hashes", made=False)
        return
    expected = trusted.hashes.get(file.name)
    if expected == digest:
        yield Outcome("hash", f"sha256 {digest}")
        return
    fault = IntegrityError(
        f"{file.name}: expected the SHA-256 {expected or 'of its name in the list'}, found "
        f"{digest}: do not install it, fetch it again"
    )
    yield Outcome("hash", str(fault), fault)


def _audit(file: Path, trusted: Trusted) -> Iterator[Outcome]:
    report = audit.audit(file, trusted.expected)
    if report.passed:
        yield Outcome("audit", f"{len(report.checks)} checks, {file.stat().st_size:,} bytes")
    for finding in report.findings:
        yield Outcome("audit", str(finding), AuditError(f"{file.name}: {finding}"))


def _sbom(file: Path, trusted: Trusted) -> Iterator[Outcome]:
    del trusted
    try:
        documents = sbom.read(file)
    except FlashvarError as error:
        yield Outcome("sbom", str(error), error)
        return
    if not documents:
        yield Outcome("sbom", "none in it, for no binary is")
    for name, text in documents.items():
        yield Outcome("sbom", f"{name}, {len(json.loads(text)['components'])} components")


def _attestation(file: Path, trusted: Trusted) -> Iterator[Outcome]:
    found = attestations.beside(file)
    why_not = None
    if not found:
        why_not = f"no {file.name}.*.attestation or .provenance beside it"
    elif trusted.publisher is None:
        why_not = "say whose it must be with --publisher OWNER/REPOSITORY:WORKFLOW.yml"
    elif not attestations.is_available():
        why_not = f"{attestations.LIBRARY} is not installed: pip install {attestations.LIBRARY}"
    if why_not is not None or trusted.publisher is None:
        yield Outcome("attestation", why_not or "", made=False)
        return
    for one in found:
        try:
            kinds = attestations.check(file, one, trusted.publisher)
        except IntegrityError as error:
            yield Outcome("attestation", str(error), error)
        else:
            yield Outcome("attestation", f"{one.name}: {', '.join(kinds)}, {trusted.publisher}")
