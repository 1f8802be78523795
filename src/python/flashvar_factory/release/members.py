"""Lists the files of a release, and compares a folder with the list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion

from flashvar.binaries import manifest as manifests
from flashvar.binaries.install_commands import public
from flashvar.binaries.manifest import Manifest
from flashvar_factory.build import wheel
from flashvar_factory.config import version
from flashvar_factory.config.expand import Build
from flashvar_factory.config.schema import Config
from flashvar_factory.errors import PackagingError, ReleaseError
from flashvar_factory.inspect import archive, core_metadata

SDIST: Final = "sdist"
_SDIST: Final = ".tar.gz"  # an sdist of another kind is a member of no release
ANY: Final = "any"


class Member(NamedTuple):
    """One file of a release."""

    distribution: str
    platform: str  # of the wheel's tag; ANY; SDIST
    version: str  # with its local label

    @property
    def partial(self) -> bool:
        """Whether its label says that not everything is in it."""
        return "+" in self.version

    def __str__(self) -> str:
        what = "sdist" if self.platform == SDIST else f"wheel for {self.platform}"
        return f"{self.distribution} {self.version} ({what})"


def expected(config: Config, builds: Sequence[Build], root: Path) -> tuple[Member, ...]:
    """The members of the release of `builds`: sources first, then the binary wheels."""
    release = version.read(config, root)
    own = canonicalize_name(config.project.name)
    members = []
    if wheel.has_pure(root):
        members += [Member(own, SDIST, release), Member(own, ANY, release)]
    members += [Member(name, ANY, release) for name in wheel.packages(config, root)]
    for build in builds:
        platform = wheel.tag(build.platform).rpartition("-")[2]
        labeled = version.of_build(release, build, config)
        members.append(Member(build.distribution, platform, labeled))
    return tuple(members)


def read(file: Path) -> Member | None:
    """The member that a file's name says it is, None where it is neither wheel nor sdist."""
    if file.suffix == ".whl":
        try:
            name = archive.parse_name(file.name)
        except PackagingError:
            return None
        if name.variant_label is not None:  # a variant has an index of its own
            return None
        return Member(
            canonicalize_name(name.distribution), name.tag.rpartition("-")[2], name.version
        )
    try:
        distribution, release = parse_sdist_filename(file.name)
    except (InvalidSdistFilename, InvalidVersion):
        return None
    kind = SDIST if file.name.endswith(_SDIST) else file.suffix
    return Member(distribution, kind, str(release))


def manifest_of(file: Path) -> Manifest | None:
    """The manifest of a binary wheel; None of any other file."""
    if file.suffix != ".whl":
        return None
    texts = (
        content
        for name, content in archive.read(file).items()
        if name.endswith(f"/{manifests.FILE_NAME}")
    )
    content = next(texts, None)
    return None if content is None else manifests.parse(archive.text(content, str(file)))


def is_plain(file: Path) -> bool:
    """Whether it is a file itself: what a link leads to changes, and a pipe is waited for."""
    return file.is_file() and not file.is_symlink()


def complaints(
    files: Iterable[Path], members: Sequence[Member], *, whole: bool = True
) -> list[str]:
    """Files that are unexpected, of another version or twice; if `whole`, also missing ones."""
    files_of: defaultdict[Member, list[Path]] = defaultdict(list)
    found = []
    wanted = {(member.distribution, member.platform): member.version for member in members}
    for file in sorted(files):
        member = read(file)
        if member is None or (member.distribution, member.platform) not in wanted:
            found.append(f"{file}: not a file of this release")
        elif not is_plain(file):
            found.append(f"{file}: expected a file, found a link, a folder or something else")
        elif member.version != wanted[member.distribution, member.platform]:
            right = wanted[member.distribution, member.platform]
            found.append(f"{file}: expected version {right}, found {member.version}")
        else:
            files_of[member].append(file)
    for member in members:
        if whole and not files_of[member]:
            found.append(f"{member}: expected one file, found none")
        elif len(files_of[member]) > 1:
            found.append(f"{member}: there twice, {' and '.join(map(str, files_of[member]))}")
    return found


def extras_complaints(pure: Path, config: Config, members: Sequence[Member]) -> list[str]:
    """Requirements of the extras of the project's wheel that no wheel of the release satisfies.

    An architecture of variants.toml that this release does not build is no complaint.
    """
    versions = {member.distribution: member.version for member in members}
    known = {target.distribution for target in config.targets.values()}
    found = []
    own = canonicalize_name(config.project.name)
    for requirement in archive.metadata(pure).requires_dist or ():
        extra, name = core_metadata.extra_of(requirement), canonicalize_name(requirement.name)
        if extra is None:
            continue
        wanted = str(requirement.specifier).removeprefix("==")
        if name not in versions and not name.startswith(f"{own}-"):
            continue  # somebody else's
        if name not in known:
            found.append(
                f"{pure.name}: the extra {extra} names {name}, which variants.toml does not build"
            )
        elif name in versions and wanted != public(versions[name]):
            found.append(
                f"{pure.name}: the extra {extra} wants {name} {wanted}, the release has "
                f"{versions[name]}"
            )
    return found


def refuse(found: Sequence[str], where: str, fix: str) -> None:
    """Raise ReleaseError where there is something to complain about, in the folder `where`."""
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise ReleaseError(f"{where}: expected the files of one release, found\n{lines}\n{fix}")
