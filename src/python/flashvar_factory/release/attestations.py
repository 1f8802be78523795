"""Verifies who published a file, by the PEP 740 attestations beside it, offline.

The trust root is the one that `sigstore` brings or fetched last: whether it is still today's cannot
be known without a network.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flashvar.errors import ConfigurationError, DamagedWheelError
from flashvar_factory.config import toml_table

if TYPE_CHECKING:
    from pypi_attestations import Attestation

LIBRARY: Final = "pypi-attestations"
# One attestation, as the publishing action leaves them; or what the integrity API of an index has.
_ONE: Final = ".attestation"
_ALL: Final = ".provenance"
_PUBLISHER: Final = re.compile(
    r"(?P<repository>[\w-]+/[\w.-]+):(?P<workflow>[\w.-]+\.ya?ml)", re.ASCII
)


class Publisher(NamedTuple):
    """Whose workflow must have published a file."""

    repository: str
    workflow: str

    @classmethod
    def parse(cls, text: str) -> Publisher:
        """Read `OWNER/NAME:WORKFLOW.yml`; ConfigurationError where it is not that."""
        matched = _PUBLISHER.fullmatch(text)
        if matched is None:
            raise ConfigurationError(
                f"--publisher: expected OWNER/REPOSITORY:WORKFLOW.yml, found {text!r}"
            )
        return cls(matched["repository"], matched["workflow"])

    def __str__(self) -> str:
        return f"{self.workflow} of {self.repository}"


def is_available() -> bool:
    """Whether the library that verifies them is installed, and what it needs."""
    try:
        importlib.import_module(LIBRARY.replace("-", "_"))
    except ImportError:
        return False
    return True


def beside(file: Path) -> tuple[Path, ...]:
    """The files beside `file` that hold attestations of it."""
    found = file.parent.glob(f"{file.name}.*")
    return tuple(sorted(path for path in found if path.suffix in (_ONE, _ALL)))


def check(file: Path, found: Path, publisher: Publisher) -> tuple[str, ...]:
    """Verify every attestation of `file` that `found` holds; their kinds.

    Raises:
        DamagedWheelError: one is not readable, of another file, or of another publisher.
    """
    from pypi_attestations import Distribution, GitHubPublisher

    expected = GitHubPublisher(repository=publisher.repository, workflow=publisher.workflow)
    try:
        attested = list(_read(found))
        kinds = [
            one.verify(expected, Distribution.from_file(file), offline=True) for one in attested
        ]
    except Exception as error:  # the library's readers of certificates and logs raise their own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DamagedWheelError(
            f"{found.name}: expected attestations of {file.name} by {publisher}, found: "
            f"{lines[0]}; do not install it"
        ) from error
    if not kinds:
        raise DamagedWheelError(f"{found.name}: expected an attestation in it, found none")
    return tuple(kind for kind, _ in kinds)


def _read(path: Path) -> Iterator[Attestation]:
    from pypi_attestations import Attestation, Provenance

    text = toml_table.read(path)
    if path.suffix == _ONE:
        yield Attestation.model_validate_json(text)
        return
    provenance: Any = Provenance.model_validate_json(text)
    for bundle in provenance.attestation_bundles:
        yield from bundle.attestations
