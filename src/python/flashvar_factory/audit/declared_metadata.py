"""Compares the metadata of a pure distribution with its pyproject.toml, field by field."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flashvar_factory.audit.finding import some
from flashvar_factory.config import extras, readme, version
from flashvar_factory.config.schema import Config
from flashvar_factory.inspect import core_metadata

_GROUP = re.compile(r"\([^()]*\)")
_TYPES: Final = {".md": "text/markdown", ".rst": "text/x-rst", ".txt": "text/plain"}
_COMPARED_APART: Final = ("metadata_version", "requires_dist", "provides_extra")


def differences(
    content: bytes, where: str, project: Mapping[str, Any], folder: Path, config: Config, root: Path
) -> Iterator[tuple[str, object, object]]:
    """What is equal in metadata that is right: its name, what [project] says, what is found.

    `folder` is that of pyproject.toml. PackagingError if the metadata cannot be read.
    """
    read = core_metadata.read(content, where)
    release = version.read(config, root)
    wanted = _fields(project, folder, release)
    found = {key: value for key, value in core_metadata.stated(content).items() if value}
    for field in sorted({*wanted, *found} - {*_COMPARED_APART}):
        right, stated = wanted.get(field), found.get(field)
        if isinstance(stated, str):
            stated = stated.strip("\n")
        name = "Python" if field == "requires_python" else field.replace("_", " ")
        yield name, right, stated
    every = (
        extras.extras(config, release)
        if "optional-dependencies" in project.get("dynamic", [])
        else project.get("optional-dependencies", {})
    )
    yield "extras", sorted(map(canonicalize_name, every)), sorted(read.provides_extra or [])
    requirements = [str(Requirement(one)) for one in project.get("dependencies", [])]
    for extra, of_extra in every.items():
        requirements += [str(_of_extra(one, extra)) for one in of_extra]
    listed = sorted(map(str, read.requires_dist or []))
    wanted_ones, found_ones = Counter(requirements), Counter(listed)
    missing, strange = sorted(wanted_ones - found_ones), sorted(found_ones - wanted_ones)
    yield "requirements", some(missing), some(strange)


def license_files(project: Mapping[str, Any], folder: Path) -> list[str] | None:
    """The files that the patterns of `license-files` mean (PEP 639); None where it is absent."""
    patterns = project.get("license-files")
    return None if patterns is None else matching(folder, patterns)


def matching(folder: Path, patterns: Iterable[str]) -> list[str]:
    """The files of a folder that patterns mean, by their names there, each once."""
    found = (path for one in patterns for path in sorted(folder.glob(one)) if path.is_file())
    return list(dict.fromkeys(path.relative_to(folder).as_posix() for path in found))


def _fields(project: Mapping[str, Any], folder: Path, release: str) -> dict[str, object]:
    """The fields that [project] makes, those of requirements aside; none that is empty."""
    text, kind = _readme(project, folder, release)
    license = project.get("license")
    fields = {
        "name": project["name"],
        "version": release if "version" in project.get("dynamic", []) else project.get("version"),
        "summary": project.get("description"),
        "description": text.strip("\n"),
        "description_content_type": kind,
        "keywords": project.get("keywords"),
        "classifiers": project.get("classifiers"),
        "license_expression": license if isinstance(license, str) else None,
        "license_files": license_files(project, folder),
        "requires_python": project.get("requires-python"),
        "project_urls": project.get("urls"),
    }
    for role in ("author", "maintainer"):
        people = project.get(f"{role}s", [])
        fields[role] = ", ".join(one["name"] for one in people if "email" not in one)
        fields[f"{role}_email"] = ", ".join(
            f"{one['name']} <{one['email']}>" if "name" in one else one["email"]
            for one in people
            if "email" in one
        )
    return {field: value for field, value in fields.items() if value}


def _readme(project: Mapping[str, Any], folder: Path, release: str) -> tuple[str, str | None]:
    """Its text and its content type."""
    if "readme" in project.get("dynamic", []):
        return readme.text(folder, project.get("urls", {}), release), readme.TYPE
    stated = project.get("readme")
    if stated is None:
        return "", None
    table = {"file": stated} if isinstance(stated, str) else stated
    file = table.get("file")
    text = table["text"] if file is None else (folder / file).read_text(encoding="utf-8")
    return text, table.get("content-type") or _TYPES.get(Path(file or "").suffix)


def _of_extra(requirement: str, extra: str) -> Requirement:
    """A requirement of an extra, as METADATA writes it."""
    text, _, marker = requirement.partition(";")
    name = canonicalize_name(extra)
    marker = marker.strip()
    alternatives = " or " in _GROUP.sub("", marker)
    both = f"({marker}) and " if alternatives else f"{marker} and "
    return Requirement(f'{text.strip()}; {both if marker else ""}extra == "{name}"')
