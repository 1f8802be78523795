"""Verifies wheels that were downloaded, without a network: every check says what it found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar.errors import ConfigurationError, DamagedWheelError, FlashvarError
from flashvar_factory import audit
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.build import sbom
from flashvar_factory.config import toml_table
from flashvar_factory.errors import AuditError, PackagingError
from flashvar_factory.index import simple_json
from flashvar_factory.release import attestations, published, steps
from flashvar_factory.release.attestations import Publisher

# A line of sha256sum, of text or of binary mode.
_SUM: Final = re.compile(r"(?P<digest>[0-9A-Fa-f]{64})[ \t]+\*?(?P<name>\S.*)")
CHECKS: Final = ("hash", "audit", "sbom", "attestation")
# What no file can say of itself.
BEYOND: Final = (
    "not checked, because it needs a network: whether the index still lists the files, whether one "
    "was yanked, and whether the trust root of attestations is current"
)


@dataclass(frozen=True)
class Outcome:
    """What one check found: nothing against the file, an error, or that it could not be made."""

    check: str
    words: str
    error: FlashvarError | None = None
    made: bool = True

    def __str__(self) -> str:
        state = "ERROR" if self.error else "ok" if self.made else "not checked"
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
        ConfigurationError: the file is no such list, or the folder no index; or it has two hashes
            of one file.
    """
    try:
        rows = list(_of_index(path) if path.is_dir() else _of_sums(path))
    except (ConfigurationError, PackagingError) as error:
        raise ConfigurationError(f"--hashes {error}") from error
    if not rows:
        raise ConfigurationError(
            f"--hashes {path}: expected lines of a SHA-256 and a file name, or the folder of an "
            "index made by this factory, found neither"
        )
    found: dict[str, str] = {}
    for name, digest in rows:
        if found.setdefault(name, digest) != digest:
            raise ConfigurationError(
                f"--hashes {path}: expected one SHA-256 of {name}, found {found[name]} and {digest}"
            )
    return found


def _of_index(folder: Path) -> Iterator[tuple[str, str]]:
    for page in sorted(folder.glob(f"*/{simple_json.FILE_NAME}")):
        yield from published.read(page).items()


def _of_sums(path: Path) -> Iterator[tuple[str, str]]:
    """Names and hashes of lines, which are all of that form."""
    for line in toml_table.read(path).removeprefix("\ufeff").splitlines():
        if not line.strip():
            continue
        matched = _SUM.fullmatch(line)
        if matched is None:
            raise PackagingError(
                f"{path}: expected lines of a SHA-256 and a file name, found {line[:80]!r}"
            )
        yield Path(matched["name"]).name, matched["digest"].lower()


def verify(file: Path, trusted: Trusted) -> tuple[Outcome, ...]:
    """Make every check of a wheel that can be made here."""
    checks = {"hash": _hash, "audit": _audit, "sbom": _sbom, "attestation": _attestation}
    return tuple(outcome for check in CHECKS for outcome in checks[check](file, trusted))


def require(outcomes: Mapping[Path, tuple[Outcome, ...]], required: Set[str]) -> None:
    """Raise the first error; a check that is required but was not made is one.

    Raises:
        DamagedWheelError: a file has other bytes, or another publisher; or that is not known.
        AuditError: a file is not what it says it is.
    """
    for file, found in outcomes.items():
        for one in found:
            if one.error is not None:
                raise one.error
            if one.check in required and not one.made:
                raise DamagedWheelError(
                    f"{file.name}: expected its {one.check} checked: {one.words}"
                )


def _hash(file: Path, trusted: Trusted) -> Iterator[Outcome]:
    digest = steps.digest(file)
    if trusted.hashes is None:
        yield Outcome("hash", f"{digest}; name what lists it with --hashes", made=False)
        return
    expected = trusted.hashes.get(file.name)
    if expected == digest:
        yield Outcome("hash", f"sha256 {digest}")
        return
    error = DamagedWheelError(
        f"{file.name}: expected the SHA-256 {expected or 'of its name in the list'}, found "
        f"{digest}: do not install it, fetch it again"
    )
    yield Outcome("hash", str(error), error)


def _audit(file: Path, trusted: Trusted) -> Iterator[Outcome]:
    report = audit.audit(file, trusted.expected)
    if report.passed:
        yield Outcome("audit", f"{len(report.checks)} checks, {file.stat().st_size:,} bytes")
    for finding in report.findings:
        words = str(finding).replace(f"{file.name}: ", "", 1)  # the line is below the file's name
        yield Outcome("audit", words, AuditError(f"{file.name}: {words}"))


def _sbom(file: Path, trusted: Trusted) -> Iterator[Outcome]:
    del trusted
    try:
        documents = sbom.read(file)
    except FlashvarError as error:
        yield Outcome("sbom", str(error).removeprefix(f"{file}: "), error)
        return
    if not documents:
        yield Outcome("sbom", "none: the wheel has no binary")
    for name, text in documents.items():
        yield Outcome("sbom", f"{name}, {len(sbom.components(text))} components")


def _attestation(file: Path, trusted: Trusted) -> Iterator[Outcome]:
    found = attestations.beside(file)
    absent = f"no {file.name}.*.attestation or .provenance next to it"
    if trusted.publisher is None:
        why_not = (
            "name its publisher with --publisher OWNER/REPOSITORY:WORKFLOW.yml" if found else absent
        )
        yield Outcome("attestation", why_not, made=False)
        return
    if not found:
        error = DamagedWheelError(
            f"{file.name}: expected an attestation by {trusted.publisher}, found {absent}: "
            "do not install it, or get the attestation too"
        )
        yield Outcome("attestation", str(error), error)
        return
    if not attestations.is_available():
        why_not = f"{attestations.LIBRARY} cannot be imported: pip install {attestations.LIBRARY}"
        yield Outcome("attestation", why_not, made=False)
        return
    for one in found:
        try:
            kinds = attestations.check(file, one, trusted.publisher)
        except DamagedWheelError as error:
            yield Outcome("attestation", str(error), error)
        else:
            yield Outcome("attestation", f"{one.name}: {', '.join(kinds)}, {trusted.publisher}")
