"""Reads `yanked.toml`, the releases that were withdrawn: a table per project (PEP 592).

    [flashvar]
    "0.1.0" = "wrong results for causal rows beyond 65536; take 0.1.1"

A key is a version or the name of one file, its value the reason that installers show. What is
yanked stays in the index: installers take it only where a lock or `==` names exactly it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from flashvar.errors import ConfigurationError
from flashvar_factory.config import toml_table
from flashvar_factory.config.suggestions import did_you_mean, listed
from flashvar_factory.config.toml_table import Table
from flashvar_factory.index.entries import Entry

FILE_NAME: Final = "yanked.toml"
_LONGEST: Final = 4096  # bytes of a reason

Yanks = Mapping[str, Mapping[str, str]]  # project -> version or file name -> reason


def read(path: Path, projects: Iterable[str]) -> dict[str, dict[str, str]]:
    """The content of the file; ConfigurationError when it names another project, or is no TOML."""
    document = toml_table.document(toml_table.read(path), path.name).rest
    known = sorted({canonicalize_name(project) for project in projects})
    yanks: dict[str, dict[str, str]] = {}
    for name, value in document.items():
        project, table = canonicalize_name(name), Table(value, name, path.name)
        if project not in known:
            raise ConfigurationError(
                f"{path.name}: unknown project {name!r}, expected {listed(known)}"
                f"{did_you_mean(project, known)}"
            )
        if project in yanks:
            raise ConfigurationError(
                f"{path.name}: expected one table of {project}, found another, [{name}]"
            )
        if not table.rest:
            raise table.wrong(None, "a version or a file, and why it was withdrawn", {})
        yanks[project] = {key: _reason(table, key) for key in list(table.rest)}
    return yanks


def _reason(table: Table, key: str) -> str:
    found = table.text(key, r".*\S.*", "a reason", _LONGEST)
    if not found.isprintable():  # terminals would follow it
        raise table.wrong(key, "a reason without control characters", found)
    return found


def require_used(yanks: Yanks, projects: Mapping[str, Iterable[Entry]], file: str) -> None:
    """ConfigurationError where an entry names no version and no file of its project."""
    for project, reasons in yanks.items():
        entries = [entry for entry in projects.get(project, ()) if entry.version is not None]
        known = {one for entry in entries for one in (entry.file, str(entry.version))}
        for key in reasons:
            if key not in known:
                names = listed(sorted(known)) or "none"
                raise ConfigurationError(
                    f"{file}: {project}: expected a version or a file that is listed ({names}), "
                    f"found {key!r}{did_you_mean(key, known)}; list earlier releases with "
                    "--extra-wheels"
                )


def reason(yanks: Yanks, project: str, entry: Entry) -> str | None:
    """Why this file was withdrawn; None when it was not."""
    of_project = yanks.get(project, {})
    if entry.version is None:
        return None
    return of_project.get(entry.file, of_project.get(entry.version))
