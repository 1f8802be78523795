"""Checks the project's own wheel and its sdist against the sources that they are made of."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from flashvar.binaries.manifest import FILE_NAME
from flashvar_factory.audit import declared_metadata
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding, some, where_they_differ
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.build import sbom, source
from flashvar_factory.config import readme, schema, toml_table
from flashvar_factory.config.schema import Config
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import core_metadata, entry_points, sdist

_METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt")
_IGNORED = "__pycache__"
# The license texts that scikit-build-core packs where pyproject.toml does not name any.
_LICENSE_FILES = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "AUTHORS*")


def sources(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The wheel has the files of the project's packages, unchanged, and every module compiles."""
    if not expected.is_projects_own(wheel.name):
        return
    yield from _compiled(wheel)
    folder = expected.folder(wheel.name)
    if folder is None:
        return
    project = toml_table.plain(folder / "pyproject.toml")
    wanted = _packages(folder, project)
    if not wanted:
        return
    of_label = wheel.name.variant_label is not None
    inside = set(_embedded(wheel)) if of_label else set()
    info = {f"{wheel.info}/{name}" for name in (*_METADATA, *(["variant.json"] * of_label))}
    licenses = {
        f"{wheel.info}/licenses/{name}": (folder / name).read_bytes()
        for name in _license_files(project, folder)
    }
    wanted |= licenses
    found = {
        entry.name: wheel.files.get(entry.name)
        for entry in wheel.entries
        if entry.name not in inside
    }
    strange = sorted(found.keys() - wanted.keys() - info)
    needed = wanted.keys() | info
    if not _entry_points(project["project"]):  # a build backend writes no empty file
        needed -= {f"{wheel.info}/entry_points.txt"}
    missing = sorted(needed - found.keys())
    differing = sorted(name for name in wanted.keys() & found.keys() if found[name] != wanted[name])
    yield from _compared(wheel.path.name, "sources", strange, missing, differing)


def _embedded(wheel: Wheel) -> Iterator[str]:
    """The files of the binary in a variant of the project's wheel."""
    for _, manifest in pairs(wheel):
        folder = f"{wheel.name.distribution}/_binaries/{manifest.kind.name}"
        yield from (f"{folder}/{file}" for file in (manifest.library.file, FILE_NAME))
        yield f"{wheel.info}/sboms/{sbom.file_name(manifest.distribution)}"


def _compared(
    where: str, check: str, strange: list[str], missing: list[str], differing: list[str]
) -> Iterator[Finding]:
    """What two sets of files differ in: a sentence for each kind of difference."""
    for wanted, found, names in (
        ("the files of the sources alone", "others too:", strange),
        ("every file of the sources", "these missing:", missing),
        ("the content of the sources", "other content in", differing),
    ):
        if names:
            shown = some([repr(name) for name in names])
            yield Finding(check, where, f"expected {wanted}, found {found} {shown}; build it again")


def _compiled(wheel: Wheel) -> Iterator[Finding]:
    for name, content in wheel.files.items():
        if name.endswith(".py") and (error := _compile_error(content, name)) is not None:
            yield Finding("sources", name, f"expected a module that compiles, found: {error}")


@cache
def _compile_error(content: bytes, name: str) -> str | None:
    """What keeps a module from compiling; cached, as a release has each module several times."""
    try:
        codec, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        if codec not in ("utf-8", "utf-8-sig"):  # some take the square of the time
            return f"the encoding {codec}"
        compile(content, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error)
    return None


def _packages(root: Path, project: Mapping[str, Any]) -> dict[str, bytes]:
    """What [tool.scikit-build] packs: packages, and other files by the names that it gives them."""
    settings = _wheel_settings(project)
    named = {Path(one).name: one for one in settings.get("packages", [])}
    named |= {name: one for one, name in settings.get("force-include", {}).items()}
    files: dict[str, bytes] = {}
    for name, package in named.items():
        top = root / package
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and _IGNORED not in path.parts:
                inside = path.relative_to(top).as_posix()
                files[name if path == top else f"{name}/{inside}"] = path.read_bytes()
    return files


def _wheel_settings(project: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = project.get("tool", {}).get("scikit-build", {}).get("wheel", {})
    return found


def _license_files(project: Mapping[str, Any], folder: Path) -> list[str]:
    """The license texts in a wheel, by their names in the folder of pyproject.toml."""
    stated = declared_metadata.license_files(project["project"], folder)
    if stated is not None:
        return stated
    patterns = _wheel_settings(project).get("license-files", _LICENSE_FILES)
    return declared_metadata.matching(folder, patterns)


def declared(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The metadata agrees with pyproject.toml and variants.toml. It has no other fields."""
    config, root, folder = expected.config, expected.root, expected.folder(wheel.name)
    if not expected.is_projects_own(wheel.name) or config is None or root is None or folder is None:
        return
    where = f"{wheel.info}/METADATA"
    project = toml_table.plain(folder / "pyproject.toml")["project"]
    groups = entry_points.parse(wheel.metadata("entry_points.txt") or "")
    wanted = _entry_points(project)
    found = {name: sorted(rows) for name, rows in groups.items()}
    if wanted != found:
        yield Finding("declared", where, f"expected entry points {wanted}, found {found}")
    content = (wheel.metadata("METADATA") or "").encode()
    yield from _declared(content, where, "declared", folder, config, root)


def _entry_points(project: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """The entry points that [project] declares, by group."""
    groups = {
        "console_scripts": project.get("scripts", {}),
        "gui_scripts": project.get("gui-scripts", {}),
        **project.get("entry-points", {}),
    }
    return {group: sorted(rows.items()) for group, rows in groups.items() if rows}


def _declared(
    content: bytes, where: str, check: str, folder: Path, config: Config, root: Path
) -> Iterator[Finding]:
    """Differences between METADATA and pyproject.toml; none if METADATA cannot be read."""
    project = toml_table.plain(folder / "pyproject.toml")["project"]
    try:
        rows = list(declared_metadata.differences(content, where, project, folder, config, root))
    except PackagingError:
        return  # another check reports it
    for what, wanted, found in rows:
        if wanted != found:
            right, wrong = where_they_differ(wanted, found)
            yield Finding(check, where, f"expected {what} {right!r}, found {wrong!r}")


def audit_sdist(path: Path, expected: Expectations) -> list[Finding]:
    """What is wrong with an sdist: its members, or their bytes, are not those of the checkout."""
    try:
        files = sdist.read(path)
    except PackagingError as error:
        return [Finding("sdist", path.name, str(error))]
    return list(_sdist(path, files, expected))


def _declared_files(root: Path) -> set[str]:
    """The texts that PKG-INFO is made of, or names: the readme and the licenses."""
    path = root / "pyproject.toml"
    project = toml_table.plain(path).get("project", {}) if path.is_file() else {}
    stated = readme.FILE_NAME if "readme" in project.get("dynamic", []) else project.get("readme")
    file = stated.get("file") if isinstance(stated, dict) else stated
    texts = declared_metadata.license_files(project, root) or []
    return {*texts, *([file] if file is not None else [])}


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
    if (expected.root / "pyproject.toml").is_file():
        content = files["PKG-INFO"]
        yield from _declared(content, where, "sdist", expected.root, expected.config, expected.root)
    listed = source.listed(expected.root)
    if listed is None:
        return
    found = {name: content for name, content in files.items() if name != "PKG-INFO"}
    tops = tuple(f"{top}/" for top in (*source.PARTS, "src"))
    alone = {*source.PARTS, "pyproject.toml", schema.FILE_NAME}
    needed = {name for name in listed if name in alone or name.startswith(tops)}
    needed |= _declared_files(expected.root) & listed
    root = expected.root
    differing = sorted(
        name for name in found.keys() & listed if found[name] != (root / name).read_bytes()
    )
    strange, missing = sorted(found.keys() - listed), sorted(needed - found.keys())
    yield from _compared(path.name, "sdist", strange, missing, differing)
