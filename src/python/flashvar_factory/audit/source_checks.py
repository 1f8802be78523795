"""Checks the project's own wheel and its sdist against the sources that they are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding, some
from flashvar_factory.build import source
from flashvar_factory.config import extras, schema, toml_table, version
from flashvar_factory.config.schema import Config
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import core_metadata, entry_points, sdist

_METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt")
_IGNORED = "__pycache__"
_GROUP = re.compile(r"\([^()]*\)")


def sources(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The wheel holds the project's packages, file by file; every module compiles."""
    if not expected.is_projects_own(wheel.name):
        return
    yield from _compiled(wheel)
    if expected.root is None or not (expected.root / "pyproject.toml").is_file():
        return
    project = toml_table.plain(expected.root / "pyproject.toml")
    wanted = _packages(expected.root, project)
    if not wanted:
        return
    of_label = wheel.name.label is not None
    inside = (f"{wheel.name.distribution}/_binaries/", f"{wheel.info}/sboms/")
    info = {f"{wheel.info}/{name}" for name in (*_METADATA, *(["variant.json"] * of_label))}
    licenses = {
        f"{wheel.info}/licenses/{name}": (expected.root / name).read_bytes()
        for name in project["project"].get("license-files", [])
    }
    wanted |= licenses
    found = {
        entry.name: wheel.files.get(entry.name)
        for entry in wheel.entries
        if not (of_label and entry.name.startswith(inside))
    }
    strange = sorted(found.keys() - wanted.keys() - info)
    missing = sorted((wanted.keys() | info) - found.keys())
    differing = sorted(name for name in wanted.keys() & found.keys() if found[name] != wanted[name])
    yield from _compared(wheel.path.name, "sources", strange, missing, differing)


def _compared(
    where: str, check: str, strange: list[str], missing: list[str], differing: list[str]
) -> Iterator[Finding]:
    """What two sets of files differ in: a sentence for each kind of difference."""
    for wanted, found, names in (
        ("the files of the sources alone", "beside them", strange),
        ("every file of the sources", "none of", missing),
        ("the bytes of the sources", "others in", differing),
    ):
        if names:
            shown = some([repr(name) for name in names])
            yield Finding(check, where, f"expected {wanted}, found {found} {shown}; build it again")


def _compiled(wheel: Wheel) -> Iterator[Finding]:
    for name, content in wheel.files.items():
        if name.endswith(".py"):
            try:
                compile(content, name, "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                yield Finding("sources", name, f"expected a module that compiles, found: {error}")


def _packages(root: Path, project: Mapping[str, object]) -> dict[str, bytes]:
    """What [tool.scikit-build] packs: the files of its packages, by their names in the wheel."""
    tool: object = project
    for key in ("tool", "scikit-build", "wheel.packages"):
        for part in key.split("."):
            tool = tool.get(part) if isinstance(tool, dict) else None
    files: dict[str, bytes] = {}
    for package in tool if isinstance(tool, list) else []:
        folder = root / str(package)
        for path in sorted(folder.rglob("*")):
            if path.is_file() and _IGNORED not in path.parts:
                name = path.relative_to(folder.parent).as_posix()
                files[name] = path.read_bytes()
    return files


def declared(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """Its metadata declares pyproject.toml's dependencies and scripts, variants.toml's extras."""
    config, root = expected.config, expected.root
    if not expected.is_projects_own(wheel.name) or config is None or root is None:
        return
    if not (root / "pyproject.toml").is_file():
        return
    where = f"{wheel.info}/METADATA"
    try:
        read = core_metadata.read((wheel.metadata("METADATA") or "").encode(), where)
    except PackagingError:
        return  # `metadata` reports it
    for what, wanted, found in _declared(read, wheel, config, root):
        if wanted != found:
            yield Finding("declared", where, f"expected {what} {wanted}, found {found}")


def _declared(
    read: Metadata, wheel: Wheel, config: Config, root: Path
) -> Iterator[tuple[str, object, object]]:
    release = version.read(config, root)
    yield "version", release, str(read.version)
    project = toml_table.plain(root / "pyproject.toml")["project"]
    groups = entry_points.parse(wheel.metadata("entry_points.txt") or "")
    scripts = sorted(project.get("scripts", {}).items())
    wanted_groups = {"console_scripts": scripts} if scripts else {}
    yield "scripts", wanted_groups, {name: sorted(rows) for name, rows in groups.items()}
    yield "Python", project.get("requires-python", ""), str(read.requires_python or "")
    every = (
        extras.extras(config, release)
        if "optional-dependencies" in project.get("dynamic", [])
        else project.get("optional-dependencies", {})
    )
    yield "extras", sorted(map(canonicalize_name, every)), sorted(read.provides_extra or [])
    wanted = [str(Requirement(one)) for one in project.get("dependencies", [])]
    for extra, requirements in every.items():
        wanted += [str(_of_extra(one, extra)) for one in requirements]
    found = sorted(map(str, read.requires_dist or []))
    missing, strange = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    yield "requirements", ("", ""), (some(missing), some(strange))


def _of_extra(requirement: str, extra: str) -> Requirement:
    """A requirement of an extra, as METADATA writes it."""
    text, _, marker = requirement.partition(";")
    name = canonicalize_name(extra)
    marker = marker.strip()
    alternatives = " or " in _GROUP.sub("", marker)
    both = f"({marker}) and " if alternatives else f"{marker} and "
    return Requirement(f'{text.strip()}; {both if marker else ""}extra == "{name}"')


def audit_sdist(path: Path, expected: Expectations) -> list[Finding]:
    """What is wrong with an sdist: its members, or their bytes, are not those of the checkout."""
    try:
        files = sdist.read(path)
    except PackagingError as error:
        return [Finding("sdist", path.name, str(error))]
    return list(_sdist(path, files, expected))


def _sdist(path: Path, files: Mapping[str, bytes], expected: Expectations) -> Iterator[Finding]:
    stem = path.name.removesuffix(".tar.gz")
    where = f"{stem}/PKG-INFO"
    try:
        read = core_metadata.read(files.get("PKG-INFO", b""), where)
    except PackagingError as error:
        yield Finding("sdist", path.name, str(error))
        return
    if f"{canonicalize_name(read.name).replace('-', '_')}-{read.version}" != stem:
        yield Finding("sdist", where, f"expected {stem}, found {read.name} {read.version}")
    if expected.config is None or expected.root is None:
        return
    if canonicalize_name(read.name) != canonicalize_name(expected.config.project.name):
        yield Finding("sdist", where, f"expected the project's own name, found {read.name}")
    release = version.read(expected.config, expected.root)
    if str(read.version) != release:
        yield Finding("sdist", where, f"expected version {release}, found {read.version}")
    listed = source.listed(expected.root)
    if listed is None:
        return
    found = {name: content for name, content in files.items() if name != "PKG-INFO"}
    tops = tuple(f"{top}/" for top in (*source.PARTS, "src"))
    alone = {*source.PARTS, "pyproject.toml", schema.FILE_NAME}
    needed = {name for name in listed if name in alone or name.startswith(tops)}
    root = expected.root
    differing = sorted(
        name for name in found.keys() & listed if found[name] != (root / name).read_bytes()
    )
    strange, missing = sorted(found.keys() - listed), sorted(needed - found.keys())
    yield from _compared(path.name, "sdist", strange, missing, differing)
