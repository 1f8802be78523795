"""Checks that a binary wheel holds its library, its manifest and its metadata, and nothing else."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from typing import Final

from packaging.utils import canonicalize_name

from flashvar.binaries.manifest import FILE_NAME
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.audit.facts import Wheel
from flashvar_factory.audit.finding import Finding
from flashvar_factory.build import binary_project, sbom
from flashvar_factory.inspect import device_code

_METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt")
_LICENSE = re.compile(r"licenses/[^/]+")
# Permissions that all tools unpack alike; the group may write, as under umask 002.
_FILE: Final[tuple[int, ...]] = (0o644, 0o664)
_PROGRAM: Final[tuple[int, ...]] = (0o755, 0o775)


def members(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The wheel has the files that its kind of wheel needs, and no others."""
    if expected.is_projects_own(wheel.name) or expected.is_variant(wheel.name):
        return  # `source_checks` compares it with the sources
    stem, info = wheel.name.distribution, wheel.info
    wanted = {f"{stem}/lib{stem}.so", f"{stem}/{FILE_NAME}", *(f"{info}/{f}" for f in _METADATA)}
    wanted.add(f"{info}/sboms/{sbom.file_name(canonicalize_name(stem))}")
    wanted |= set(_licenses(wheel))
    # auditwheel, when it repairs a wheel, adds entries for the folders.
    folders = {f"{name.rpartition('/')[0]}/" for name in wanted} | {f"{info}/"}
    found = {entry.name for entry in wheel.entries} - folders
    for name in sorted(found - wanted):
        yield Finding(
            "members",
            repr(name),
            f"expected {stem}'s library, manifest, metadata, licenses and SBOM alone, found this "
            "file too; leave it out of the wheel",
        )
    for name in sorted(wanted - found):
        yield Finding("members", name, "expected this file, found none; build the wheel again")
    for name, content in wheel.files.items():
        form = device_code.within(content)
        if form is not None:
            message = f"expected device code in the library alone, found {form} in this file"
            yield Finding("members", name, message)
    if wheel.name.variant_label is not None:
        yield Finding(
            "members",
            wheel.path.name,
            "expected a variant label in the name of the project's own wheel alone, found "
            f"{wheel.name.variant_label}; rename the file",
        )
    if expected.config is not None and expected.architecture(wheel.name) is None:
        known = ", ".join(sorted(expected.architectures))
        yield Finding(
            "members",
            wheel.path.name,
            f"expected a distribution of variants.toml ({known}), found {canonicalize_name(stem)}",
        )


def modes(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """File modes: all may read, others may not write, and only programs may be executed."""
    del expected
    libraries = {library.path for library in wheel.libraries}
    for entry in wheel.entries:
        is_program = entry.name in libraries or wheel.files.get(entry.name, b"").startswith(b"#!")
        allowed = _PROGRAM if entry.name.endswith("/") else _FILE
        allowed += _PROGRAM if is_program else ()
        found = stat.S_IMODE(entry.mode)
        if entry.mode and found not in allowed:
            yield Finding(
                "modes",
                entry.name,
                f"expected the permissions {allowed[0]:04o}, found {found:04o}; chmod the file "
                "and build the wheel again",
            )


def _licenses(wheel: Wheel) -> list[str]:
    names = (name for name in wheel.files if name.startswith(f"{wheel.info}/"))
    return [name for name in names if _LICENSE.fullmatch(name.removeprefix(f"{wheel.info}/"))]


def licenses(wheel: Wheel, expected: Expectations) -> Iterator[Finding]:
    """The license files are those that METADATA lists, with the texts of the sources."""
    if expected.is_projects_own(wheel.name) or expected.is_variant(wheel.name):
        return
    prefix = f"{wheel.info}/licenses/"
    found = {name.removeprefix(prefix): wheel.files[name] for name in _licenses(wheel)}
    lines = (wheel.metadata("METADATA") or "").split("\n\n")[0].splitlines()
    listed = [
        line.removeprefix("License-File: ") for line in lines if line.startswith("License-File: ")
    ]
    if sorted(listed) != sorted(found):
        yield Finding(
            "licenses",
            f"{wheel.info}/METADATA",
            f"expected a License-File for each of {sorted(found)}, found {sorted(listed)}",
        )
    if expected.root is None:
        return
    wanted = {
        name: (expected.root / name).read_bytes()
        for name in binary_project.license_files(expected.root)
    }
    # A folder that is a part of the project, as tests build in, may be without them; a release not.
    names = found.keys() | (wanted.keys() if expected.revision is not None else set())
    for name in sorted(names):
        if wanted.get(name) != found.get(name):
            yield Finding(
                "licenses", prefix + name, "expected the text in the sources, found another or none"
            )
