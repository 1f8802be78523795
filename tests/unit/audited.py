"""What the audit has against a wheel of a test."""

from __future__ import annotations

from pathlib import Path

from flashvar_factory import audit
from flashvar_factory.audit.expectations import Expectations


def faults(path: Path, expected: Expectations | None = None) -> list[str]:
    """Its findings as sentences."""
    return [str(finding) for finding in audit.audit(path, expected).findings]
