"""Checks METADATA, WHEEL and entry points against file name, manifest and variants.toml."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from packaging.metadata import Metadata
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name

from flashvar.binaries.manifest import Manifest
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.build import binary_project
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import core_metadata, entry_points

_GENERATOR = re.compile(r"[\w.+-]+ [\w.+-]+")
_TAG = "py3-none-"
# What a binary distribution states of itself; `License-File` is compared with the files.
_FIELDS = (
    "Metadata-Version",
    "Name",
    "Version",
    "Summary",
    "License-Expression",
    "License-File",
    "Requires-Python",
    "Description-Content-Type",
    "Requires-Dist",
)


def metadata(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """METADATA is valid, and agrees with the manifest and variants.toml. It has no other fields."""
    where, text = f"{wheel.info}/METADATA", wheel.metadata("METADATA")
    if text is None:
        yield Finding("metadata", where, "expected METADATA, found none")
        return
    try:
        read = core_metadata.read(text.encode(), where)
    except PackagingError as error:
        yield Finding("metadata", where, str(error).removeprefix(f"{where}: "))
        return
    stated = core_metadata.stated(text.encode())
    rows: list[tuple[str, object, object]] = [
        ("name", canonicalize_name(wheel.name.distribution), canonicalize_name(read.name)),
        ("version", wheel.name.version, stated.get("version")),
    ]
    if not (expected.is_projects_own(wheel.name) or expected.is_variant(wheel.name)):
        rows += _of_a_binary(text)
        version = binary_project.METADATA_VERSION
        rows.append(("version of the format", version, stated.get("metadata_version")))
        for _, manifest in pairs(wheel):
            rows += _said(manifest, read)
        torch = next((manifest.torch for _, manifest in pairs(wheel)), None)
        required = sorted(map(str, read.requires_dist or []))
        rows.append(("requirements", binary_project.requirements_of(torch), required))
        rows.append(("Python", binary_project.REQUIRES_PYTHON, stated.get("requires_python")))
    if expected.config is not None:
        rows.append(("license", expected.config.project.license, read.license_expression))
    for what, wanted, found in rows:
        if wanted != found:
            yield Finding("metadata", where, f"expected {what} {wanted!r}, found {found!r}")


def _of_a_binary(text: str) -> Iterator[tuple[str, object, object]]:
    """Each field once, and none that is not known."""
    head = text.partition("\n\n")[0]
    fields = Counter(line.partition(":")[0] for line in head.splitlines())
    many = [name for name, count in fields.items() if count > 1 and name != "License-File"]
    strange = [name for name in fields if name not in _FIELDS]
    yield "repeated or unknown fields", [], sorted({*many, *strange})


def _said(manifest: Manifest, read: Metadata) -> Iterator[tuple[str, object, object]]:
    """Summary and description, which an index shows; a description may be absent."""
    project, architecture = manifest.project, manifest.architecture
    yield "name, as its manifest writes it,", manifest.distribution, read.name
    yield "summary", binary_project.summary_of(project, architecture), read.summary
    found = (read.description or "").strip("\n")
    if not found and read.description_content_type is None:
        return
    readme = binary_project.readme_of(project, manifest.distribution, architecture)
    yield "description", readme.strip("\n"), found
    kind = read.description_content_type
    yield "content type of the description", binary_project.README_TYPE, kind


def wheel_file(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """WHEEL has the tags of the file name, which fit every Python 3."""
    where, text = f"{wheel.info}/WHEEL", wheel.metadata("WHEEL")
    if text is None:
        yield Finding("wheel_file", where, "expected a file WHEEL, found none")
        return
    rows = entry_points.headers(text)
    is_pure = expected.is_projects_own(wheel.name) and not wheel.libraries
    tags = {value for name, value in rows if name == "Tag"}
    generators = [value for name, value in rows if name == "Generator"]
    rest = sorted((name, value) for name, value in rows if name not in ("Tag", "Generator"))
    wanted = [("Root-Is-Purelib", "true" if is_pure else "false"), ("Wheel-Version", "1.0")]
    for what, right, found in (
        ("fields", wanted, rest),
        ("tags", sorted(map(str, parse_tag(wheel.name.tag))), sorted(tags)),
        ("number of tags", len(tags), sum(name == "Tag" for name, _ in rows)),
    ):
        if right != found:
            yield Finding("wheel_file", where, f"expected {what} {right}, found {found}")
    if len(generators) != 1 or _GENERATOR.fullmatch(generators[0]) is None:
        shown = ", ".join(generators) or "none"
        yield Finding(
            "wheel_file", where, f"expected one Generator, as 'name version', found {shown}"
        )
    label = f"-{wheel.name.variant_label}" if wheel.name.variant_label is not None else ""
    python = wheel.name.tag.rpartition("-")[0]
    tag = f"{python}-{'.'.join(dict.fromkeys(wheel.platforms))}"  # each platform once
    name = f"{wheel.name.distribution}-{wheel.name.version}-{tag}{label}.whl"
    if wheel.path.name != name:
        yield Finding(
            "wheel_file", wheel.path.name, f"expected the file name {name}, found another"
        )
    tag = "py3-none-any" if is_pure else _TAG
    if not wheel.name.tag.startswith(tag):
        yield Finding(
            "wheel_file",
            wheel.path.name,
            f"expected the tag {tag}{'' if is_pure else '<platform>'} of a wheel without Python "
            f"extension modules, found {wheel.name.tag}",
        )


def entries(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """There is one entry point: the one by which the project finds the binary."""
    if expected.is_projects_own(wheel.name) or expected.is_variant(wheel.name):
        return
    where = f"{wheel.info}/entry_points.txt"
    text = wheel.metadata("entry_points.txt") or ""
    groups = entry_points.parse(text)
    for _, manifest in pairs(wheel):
        wanted = {f"{manifest.project}.binaries": [(manifest.kind.name, wheel.name.distribution)]}
        if groups != wanted or text.count("[") > 1:
            yield Finding(
                "entries",
                where,
                f"expected {wanted}, by which {manifest.project} finds it, found {groups}",
            )
