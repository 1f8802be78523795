"""Checks that the files of a folder are the release of this commit, before any is published.

The files are those that a build left, downloaded again: each check reads their bytes. The
hashes of what was checked are written down, so that what is uploaded later can be compared.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flashvar.binaries.install_commands import public
from flashvar.binaries.manifest import Manifest
from flashvar.errors import FlashvarError
from flashvar_factory import audit, index
from flashvar_factory.audit import expectations, source_checks
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.build import sbom, source
from flashvar_factory.config import toml_table, version
from flashvar_factory.config.expand import expand_platforms
from flashvar_factory.config.schema import Config
from flashvar_factory.config.selection_arguments import SelectionArguments
from flashvar_factory.errors import ReleaseError
from flashvar_factory.inspect import json_text, zip_file
from flashvar_factory.release import (
    checkout,
    gpu_records,
    members,
    merge,
    notes,
    published,
    reproduce,
    smoke,
    tag,
)
from flashvar_factory.release.gpu_runs import GpuRun
from flashvar_factory.release.members import Member
from flashvar_factory.release.pythons import Python
from flashvar_factory.release.steps import digest, digests

SCHEMA: Final = 1
FILE: Final = "release.json"
NOTES: Final = "notes.md"
SBOMS: Final = "sboms"
_KEYS: Final = frozenset(
    {"schema", "project", "version", "revision", "tag", "files", "gpu_records"}
)
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ReleaseFiles:
    """The files that may become a release, and what they are checked against."""

    root: Path
    config: Config
    folder: Path
    second_build: Path  # the files of a second build
    tag: str | None = None  # None: a rehearsal
    indexes: tuple[str, ...] = ()  # where they are to be published
    pythons: tuple[Python, ...] = ()  # to install them into

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files in the folder; `complete` checks what else is there."""
        if not self.folder.is_dir():
            raise ReleaseError(
                f"{self.folder}: expected the folder of a release, found none; build it first"
            )
        return _files(self.folder)

    @cached_property
    def wheels(self) -> tuple[Path, ...]:
        """The wheels among the files."""
        return tuple(file for file in self.files if file.suffix == ".whl")

    @cached_property
    def version(self) -> str:
        """What the sources say."""
        return version.read(self.config, self.root)

    @cached_property
    def revision(self) -> str | None:
        """The commit of the sources."""
        return source.stated(self.root)[0]

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """What has to be there: everything of variants.toml, for every platform."""
        return members.expected(
            self.config, expand_platforms(SelectionArguments(), self.config), self.root
        )

    @property
    def expected(self) -> Expectations:
        """What the audit checks against."""
        return expectations.of(self.config, root=self.root, revision=self.revision)

    @cached_property
    def manifests(self) -> dict[Path, Manifest]:
        """Those of the binary wheels."""
        found = {file: members.manifest_of(file) for file in self.wheels}
        return {file: one for file, one in found.items() if one is not None}

    @cached_property
    def used_records(self) -> dict[str, list[GpuRun]]:
        """The records of GPU runs that count, by what they show."""
        wanted = gpu_records.needs(self.root, self.config.project.name, self.manifests.values())
        return gpu_records.choose(self.root, wanted)


def sources(release: ReleaseFiles) -> str:
    """The checkout is a commit without changes."""
    return f"commit {checkout.revision(release.root)} without changes"


def tagged(release: ReleaseFiles) -> str:
    """The tag is the version's, and on the commit."""
    if release.tag is None:
        return "no tag: this is a rehearsal, of which nothing can be published"
    tag.require(release.tag, release.root, release.version, release.revision)
    return f"{release.tag} is on it"


def changelog(release: ReleaseFiles) -> str:
    """The changelog has a dated part of this version."""
    if release.tag is None:
        return "not read: a rehearsal"
    changed = notes.changes(release.root, release.version)
    return f"{len(changed.splitlines())} lines on {release.version}"


def complete(release: ReleaseFiles) -> str:
    """Every file of the release is there, and no other; extras name wheels that are."""
    found = members.complaints(release.folder.iterdir(), release.members)
    if not found:
        found = merge.projects_extras(release.files, release.config, release.members)
    members.refuse(found, str(release.folder), "build the whole set again, of one commit")
    return f"{len(release.files)} files, those of variants.toml"


def rebuilt(release: ReleaseFiles) -> str:
    """A second build gave the same bytes."""
    second = release.second_build
    if not second.is_dir() or second.resolve() == release.folder.resolve():
        raise ReleaseError(
            f"--second-build {second}: expected the folder of a second build, found "
            f"{'the first' if second.is_dir() else 'none'}; build everything twice"
        )
    where = f"they are in {release.folder} and {second}"
    reproduce.require(release.files, _files(second), where)
    for file in release.files:
        if (second / file.name).samefile(file):
            raise ReleaseError(
                f"--second-build {second}: expected files of a second build, found {file.name} of "
                "the first, linked; build everything twice"
            )
    return f"{len(release.files)} files were built twice, and are the same bytes"


def audited(release: ReleaseFiles) -> str:
    """Each file is what it claims to be, of this commit."""
    reports = [audit.audit(file, release.expected) for file in release.wheels]
    for report in reports:
        if not report.passed:
            print(report.text())
    sdists = [file for file in release.files if file.name.endswith(".tar.gz")]
    audit.require_sdists(
        {file: source_checks.audit_sdist(file, release.expected) for file in sdists}
    )
    audit.require(reports)
    return f"nothing against {len(reports)} wheels and {len(sdists)} sdists"


def sboms(release: ReleaseFiles) -> str:
    """Each binary wheel has an SBOM, and it is valid; those of a platform agree on their parts."""
    require_same_parts(
        (file, manifest.platform, text)
        for file, manifest in release.manifests.items()
        for text in sbom.read(file).values()
    )
    return f"one in each of {len(release.manifests)} binary wheels"


def require_same_parts(documents: Iterable[tuple[Path, str, str]]) -> None:
    """ReleaseError where two SBOMs for a platform have one part of one version by two hashes."""
    hashes: dict[tuple[str, str, str], dict[str, str]] = {}
    for file, platform, text in documents:
        for one in sbom.components(text):
            part = (one.name, one.version, platform)
            hashes.setdefault(part, {}).setdefault(one.sha256, file.name)
    for (name, number, platform), files in hashes.items():
        if len(files) > 1:
            found = ", ".join(f"{digest or 'none'} in {file}" for digest, file in files.items())
            raise ReleaseError(
                f"expected one hash of {name} {number} in the SBOMs for {platform}, found {found}; "
                "build the whole set again, by one toolchain"
            )


def records(release: ReleaseFiles) -> str:
    """What is released ran on a GPU, by records of these sources."""
    names = {one.file: None for every in release.used_records.values() for one in every}
    return f"relies on {', '.join(names)}"


def unused(release: ReleaseFiles) -> str:
    """No index has other files of this version."""
    for address in release.indexes:
        published.absent(release.files, address)
    return f"no other files of this version on {', '.join(release.indexes) or 'no index asked'}"


def installed(release: ReleaseFiles) -> str:
    """The wheels install from an index of them, and work."""
    with tempfile.TemporaryDirectory(prefix="index-") as folder:
        site = Path(folder, "site")
        index.write(release.folder, site)
        report = smoke.run_with_index(
            release.folder,
            site,
            root=release.root,
            config=release.config,
            pythons=release.pythons,
        )
    return f"{len(report.checks)} environments are fine"


Check = Callable[[ReleaseFiles], str]

CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "sources": sources,
        "tag": tagged,
        "changelog": changelog,
        "files": complete,
        "second build": rebuilt,
        "audit": audited,
        "SBOM": sboms,
        "GPU records": records,
        "index": unused,
    }
)
# Minutes, so of a release with nothing against it alone.
LAST: Final[Mapping[str, Check]] = MappingProxyType({"smoke": installed})


def check_all(release: ReleaseFiles) -> dict[str, Any]:
    """Make every check and print what it found; the document of what was checked.

    ReleaseError after the last check where there is anything against the release.
    """
    hashes = digests(release.files)
    errors = _errors(release, CHECKS) or _errors(release, LAST)
    if errors:
        lines = "\n".join(f"{name}: {message}" for name, message in errors.items())
        raise ReleaseError(
            f"expected a release that passes every check, found errors in {len(errors)} of "
            f"{len(CHECKS) + len(LAST)} checks; publish nothing of it\n{lines}"
        )
    return {
        "schema": SCHEMA,
        "project": release.config.project.name,
        "version": release.version,
        "revision": release.revision,
        "tag": release.tag,
        "files": hashes,
        "gpu_records": {
            need: [one.file for one in found] for need, found in release.used_records.items()
        },
    }


def _files(folder: Path) -> tuple[Path, ...]:
    """The files of a folder; ReleaseError where one is larger than any check reads."""
    found = tuple(path for path in sorted(folder.iterdir()) if path.is_file())
    for path in found:
        if (size := path.stat().st_size) > zip_file.FILE_BYTES:
            raise ReleaseError(
                f"{path}: expected at most {zip_file.FILE_BYTES:,} bytes, found {size:,}; publish "
                "nothing of it"
            )
    return found


def _errors(release: ReleaseFiles, checks: Mapping[str, Check]) -> dict[str, str]:
    found = {}
    for name, check in checks.items():
        try:
            print(f"ok: {name}: {check(release)}", flush=True)
        except FlashvarError as error:
            found[name] = str(error)
            print(f"ERROR: {name}", flush=True)
    return found


def write(release: ReleaseFiles, document: Mapping[str, Any], output: Path) -> list[Path]:
    """Write the document, the notes and the SBOMs, which attestations are made of."""
    (output / SBOMS).mkdir(parents=True, exist_ok=True)
    made = [output / FILE, output / NOTES]
    made[0].write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    changed = notes.changes(release.root, release.version) if release.tag else "A rehearsal."
    text = notes.text(
        changed,
        document["revision"],
        release.used_records,
        release.manifests.values(),
        document["files"],
    )
    made[1].write_text(text, encoding="utf-8")
    for file, manifest in release.manifests.items():
        (content,) = sbom.read(file).values()
        platform = manifest.platform.removeprefix("linux_")
        made.append(output / SBOMS / f"{manifest.distribution}-{platform}.cdx.json")
        made[-1].write_text(content, encoding="utf-8")
    return made


def read(path: Path) -> dict[str, str]:
    """The hashes of what may be published, by file name; ReleaseError where nothing may be."""
    try:
        document = json_text.parse(toml_table.read(path).encode(), path.name)
    except FlashvarError as error:
        raise ReleaseError(f"{error}; check-release writes this file") from error
    try:
        tagged_as, hashes = document["tag"], document["files"]
        if not isinstance(hashes, dict):
            raise ValueError("no table of files")
        if not hashes or not all(_SHA256.fullmatch(digest) for digest in hashes.values()):
            raise ValueError("no files with their SHA-256")
        if document["schema"] != SCHEMA:
            raise ValueError(f"the schema {document['schema']!r}")
        if document.keys() != _KEYS:
            raise ValueError(f"other keys, {sorted(document.keys() ^ _KEYS)}")
        if tagged_as is not None and tagged_as != f"v{document['version']}":
            raise ValueError(f"the tag {tagged_as!r} of the version {document['version']!r}")
        others = [name for name in hashes if not _is_of(name, document["version"])]
        if others:
            raise ValueError(f"files of other versions, {others[0]!r}")
    except (ValueError, LookupError, TypeError) as error:
        raise ReleaseError(
            f"{path}: expected what check-release wrote, found {error!r}; check the release first"
        ) from error
    if tagged_as is None:
        raise ReleaseError(
            f"{path}: expected a release that was checked with its tag, found a rehearsal; "
            "check-release --tag"
        )
    return hashes


def _is_of(name: str, release: str) -> bool:
    """Whether a file's name is of a version, whatever its label."""
    member = members.read(Path(name))
    return member is not None and public(member.version) == release


def require(files: Sequence[Path], hashes: Mapping[str, str]) -> None:
    """ReleaseError where the files are not all that were checked, and as they were then."""
    found = []
    for file in files:
        here = digest(file) if members.is_plain(file) else "a link, a folder or something else"
        if here != (checked := hashes.get(file.name, "of no such file")):
            found.append(f"{file.name}: expected the SHA-256 {checked}, found {here}")
    absent = sorted(hashes.keys() - {file.name for file in files})
    found += [f"{name}: expected this file, found none" for name in absent]
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise ReleaseError(
            f"expected the files that were checked, found\n{lines}\ncheck the release again"
        )
