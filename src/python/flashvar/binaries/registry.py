"""The registry of installed binaries, and of folders that are rejected, with the reason.

Listing is cheap: it reads manifests and file sizes, and opens no library. For each kind of binary
(architecture and oldest driver) the first folder is used, in this order: FLASHVAR_LIB_DIR, a
separate wheel, a binary embedded in flashvar itself. Among wheels and embedded binaries, one of
flashvar's own version is preferred. The other folders are listed as rejected. If a library does
not export a function that its manifest lists, the next folder that has it is used too.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Final

from flashvar._version import __version__
from flashvar.binaries import extras as available
from flashvar.binaries import install_commands
from flashvar.binaries import manifest as manifests
from flashvar.binaries.extras import NO_EXTRAS, Extras
from flashvar.binaries.install_commands import public
from flashvar.binaries.kinds import Architecture, BinaryKind
from flashvar.binaries.manifest import Manifest
from flashvar.errors import ManifestError
from flashvar.machine import distributions
from flashvar.machine.system import platform_tag

ENTRY_POINT_GROUP: Final = "flashvar.binaries"
LIB_DIR: Final = "FLASHVAR_LIB_DIR"
# The INSTALLER of a development build that was installed in place of a wheel.
DEVELOPMENT: Final = "flashvar_factory"
# Entry points of one distribution that are looked at: a wheel has one.
_ENTRIES: Final = 64


@dataclass(frozen=True)
class BinaryFolder:
    """A folder that may hold a binary, and where it was found."""

    path: Path
    origin: str  # for people, e.g. "wheel <name> <version>"
    fix: str  # the command or the step that replaces it
    from_lib_dir: bool = False  # the user named it, through FLASHVAR_LIB_DIR
    wheel: str | None = None  # the distribution to replace; None: no wheel, or a development build


@dataclass(frozen=True)
class Binary:
    """A folder with a valid manifest and a library of the size in the manifest."""

    folder: BinaryFolder
    manifest: Manifest
    missing: tuple[tuple[str, str], ...] = ()  # (function, reason) that its library does not export

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder.path / self.manifest.library.file

    @property
    def functions(self) -> frozenset[str]:
        """The functions that its manifest lists and that its library is not known to lack."""
        listed = {row.function for row in self.manifest.kernels}
        return frozenset(listed.difference(dict(self.missing)))

    @property
    def architecture(self) -> Architecture:
        """The architecture that the library was compiled for."""
        return self.manifest.architecture

    @property
    def kind(self) -> BinaryKind:
        """The architecture, and the oldest CUDA major whose drivers run it."""
        return self.manifest.kind

    @property
    def version_mismatch(self) -> str | None:
        """A message if its version differs from flashvar's, ignoring local labels; else None."""
        found = public(self.manifest.version)
        if found == public(__version__):
            return None
        return (
            f"{self.folder.origin} holds version {found}, flashvar is {public(__version__)}; "
            f"for the same version of both: {self.folder.fix}"
        )


@dataclass(frozen=True)
class RejectedFolder:
    """A folder that is not used, and why."""

    folder: BinaryFolder
    kind: str | None  # its name; None: the manifest could not be read
    reason: str
    fix: str | None

    def __str__(self) -> str:
        """Where it was found, and why it is not used."""
        return f"{self.folder.origin}: {self.reason}"


@dataclass(frozen=True)
class Inventory:
    """Rejected folders, and binaries, of each kind the preferred one first."""

    binaries: tuple[Binary, ...] = ()
    rejected: tuple[RejectedFolder, ...] = ()
    extras: Extras = NO_EXTRAS  # the extras of `pip install flashvar[...]`


_unloadable: dict[Path, str] = {}
_missing: dict[Path, dict[str, str]] = {}


@cache
def installed() -> Inventory:
    """The inventory of this machine, taken once per process."""
    found = list(folders(os.environ))
    return list_binaries(
        found,
        unloadable=_unloadable,
        missing=_missing,
        extras=available.of_installed(platform_tag()),
    )


def reject(binary: Binary, reason: str) -> Inventory:
    """Reject a binary whose library did not load; the next folder of its kind replaces it."""
    _unloadable[binary.folder.path] = reason
    installed.cache_clear()
    return installed()


def without_function(binary: Binary, function: str, reason: str) -> Inventory:
    """Record that a binary's library does not export a function; its others can still be used.

    The next folder of its kind that has the function is listed behind it.
    """
    _missing.setdefault(binary.folder.path, {})[function] = reason
    installed.cache_clear()
    return installed()


def folders(environ: Mapping[str, str]) -> Iterator[BinaryFolder]:
    """Every folder that may hold a binary, in order of precedence, each once.

    Their paths are absolute: a program may change its current folder, and dlopen searches its own
    folders for a bare file name.
    """
    seen: set[str] = set()
    for folder in (*_in_lib_dir(environ), *in_wheels(), *_embedded()):
        resolved = os.path.realpath(folder.path)  # of a loop of links too
        if resolved not in seen:
            seen.add(resolved)
            yield replace(folder, path=folder.path.absolute())


def list_binaries(
    found: Iterable[BinaryFolder],
    *,
    unloadable: Mapping[Path, str] | None = None,
    missing: Mapping[Path, Mapping[str, str]] | None = None,
    extras: Extras = NO_EXTRAS,
) -> Inventory:
    """Check folders, given in order of precedence; the libraries of `unloadable` did not load."""
    usable: list[Binary] = []
    rejected: list[RejectedFolder] = []
    for folder in found:
        try:
            manifest = manifests.read(folder.path / manifests.FILE_NAME)
        except ManifestError as error:
            rejected.append(RejectedFolder(folder, None, str(error), folder.fix))
            continue
        missing_functions = (missing or {}).get(folder.path, {})
        binary = Binary(folder, manifest, tuple(missing_functions.items()))
        name = binary.kind.name
        reason = _rejection_reason(binary) or (unloadable or {}).get(folder.path)
        if reason is not None:
            rejected.append(RejectedFolder(folder, name, reason, folder.fix))
        else:
            usable.append(binary)
    binaries: dict[str, list[Binary]] = {}
    for binary in sorted(usable, key=_preference):
        name = binary.kind.name
        before = binaries.setdefault(name, [])
        if not before or _missed(before) & binary.functions:
            before.append(binary)
            continue
        first = before[0]
        better = first.version_mismatch is None and binary.version_mismatch is not None
        why = "which has flashvar's version" if better else "which comes first"
        reason = f"replaced by {first.folder.origin}, {why}"
        rejected.append(RejectedFolder(binary.folder, name, reason, None))
    in_order = sorted(binaries.values(), key=lambda alike: alike[0].kind)
    return Inventory(tuple(chain.from_iterable(in_order)), tuple(rejected), extras)


def _missed(binaries: list[Binary]) -> set[str]:
    """The functions that are missing in a library and that none of the others has."""
    missing = {name for binary in binaries for name, _ in binary.missing}
    return missing.difference(*(binary.functions for binary in binaries))


def _preference(binary: Binary) -> tuple[bool, bool]:
    """Sort key: binaries that the user named first, then those of flashvar's own version."""
    return not binary.folder.from_lib_dir, binary.version_mismatch is not None


def _rejection_reason(binary: Binary) -> str | None:
    """The reason why a binary cannot be used, found without opening its library; None if none."""
    manifest = binary.manifest
    if manifest.abi != manifests.ABI:
        return f"expected ABI {manifests.ABI}, found {manifest.abi}"
    if manifest.platform != platform_tag():
        return f"expected a library for {platform_tag()}, found one for {manifest.platform}"
    try:
        found = binary.library.stat()
    except OSError as error:
        return f"expected {manifest.library.file} next to its manifest, found: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):  # a named pipe would be waited for
        return f"expected {manifest.library.file} to be a regular file, found something else"
    size = found.st_size
    if size != manifest.library.bytes:
        expected = manifest.library.bytes
        return f"expected {manifest.library.file} to have {expected} bytes, found {size}"
    return None


def _in_lib_dir(environ: Mapping[str, str]) -> Iterator[BinaryFolder]:
    named = environ.get(LIB_DIR)
    if not named:
        return
    folder = Path(named)
    with suppress(RuntimeError):  # `~` of a user without a home
        folder = folder.expanduser()
    try:
        own = (folder / manifests.FILE_NAME).is_file()
        children = sorted(path.parent for path in folder.glob(f"*/{manifests.FILE_NAME}"))
    except OSError:  # the folder is not readable, or its name is too long
        own, children = False, []
    # Without any manifest it is the folder itself, so that the mistake is reported.
    for directory in [folder] if own or not children else children:
        origin = f"{LIB_DIR} ({directory})"
        yield BinaryFolder(
            directory, origin, f"build it again, or unset {LIB_DIR}", from_lib_dir=True
        )


def in_wheels(path: Sequence[str] | None = None) -> Iterator[BinaryFolder]:
    """The folders that distributions name in their entry points; of `sys.path`, or of `path`."""
    # Not `entry_points()`: it hides the second of two distributions with one name, and fails on a
    # malformed file of any other package.
    for distribution in metadata.distributions(path=list(sys.path if path is None else path)):
        entries = _entries(distribution)
        if not entries:
            continue
        name, version = _name(distribution)
        is_development = distributions.text(distribution, "INSTALLER").strip() == DEVELOPMENT
        for kind, folder in entries:
            directory = Path(str(distribution.locate_file(folder)))
            fix = (
                f"nox -s build-dev -- arch={kind}"
                if is_development
                else install_commands.install_again(name, kind)
            )
            wheel = None if is_development else name
            yield BinaryFolder(directory, f"wheel {name} {version}", fix, wheel=wheel)


def _name(distribution: metadata.Distribution) -> tuple[str, str]:
    """Name and version of a distribution for messages; also works with damaged METADATA."""
    fields = distributions.fields(distribution)
    return fields["Name"] or "without a name", fields["Version"] or "of unknown version"


def _entries(distribution: metadata.Distribution) -> list[tuple[str, str]]:
    """Name and value of a distribution's entry points in our group; empty if not readable."""
    section = ""
    entries = []
    for line in map(str.strip, distributions.text(distribution, "entry_points.txt").splitlines()):
        if line.startswith("["):
            section = line
        elif section == f"[{ENTRY_POINT_GROUP}]" and "=" in line and line.isprintable():
            name, _, value = line.partition("=")
            entries.append((name.strip(), value.strip()))
    return list(dict.fromkeys(entries))[:_ENTRIES]


def _embedded() -> Iterator[BinaryFolder]:
    folder = Path(__file__).parents[1] / "_binaries"
    fix = f"install the wheel variant of flashvar {public(__version__)} again"
    for path in sorted(folder.glob(f"*/{manifests.FILE_NAME}")):
        yield BinaryFolder(path.parent, "embedded in flashvar", fix)
