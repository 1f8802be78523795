"""Gathers everything that the checks of a wheel need, once and in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from flashvar.binaries import manifest as manifests
from flashvar.binaries.manifest import Launch
from flashvar_factory.errors import BuildError, PackagingError
from flashvar_factory.inspect import (
    archive,
    cubin,
    device_code,
    dynamic,
    elf,
    entry_points,
    fatbin,
    kernel_facts,
    ptx,
    zip_file,
)
from flashvar_factory.inspect.dynamic import Dynamic

_METADATA: Final = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "variant.json")
_FACTS_SUFFIX: Final = ".kernels"  # of the section of kernel facts: .<project>.kernels
# A manifest of ours has 0.1 MB; of members larger than what is kept, the hash is known alone.
_TEXT_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 1 << 22
_CUBIN: Final = 1  # the major version of the format of all cubins


@dataclass(frozen=True)
class Entry:
    """One member of the archive."""

    name: str
    escape: str | None  # why it may be unpacked elsewhere than its name reads
    mode: int  # of Unix, 0 where the archive has none
    size: int
    sha256: bytes


@dataclass(frozen=True)
class Image:
    """One image of device code."""

    kind: str  # "sass", "ptx"
    code: str  # "90a"; what the code states itself, where it was opened
    form: tuple[int, int]  # version of the format: of PTX, or (1, ABI) of a cubin
    # What its entry in the container states.
    entry_code: str
    entry_form: tuple[int, int]
    entry_flags: int
    entry_words: bytes  # name and options; drivers ignore them
    compression: str | None
    stored_bytes: int
    opened_bytes: int
    functions: tuple[cubin.Function, ...] | None  # None: PTX, or not opened
    toolkit: str | None = None  # that made the machine code, where it left a note
    stack: int | None = None  # bytes per thread: the most that any function takes
    embedded: str | None = None  # device code inside machine code: PTX, for debuggers
    api: int | None = None  # the CUDA that machine code was made by: 10 * major + minor
    kernels: tuple[ptx.Kernel, ...] | None = None  # of PTX; None where it was not opened
    before_13: bool | None = None  # machine code in the format of CUDA 12; None: cannot be told
    differences: tuple[str, ...] = ()  # from what compilers write


@dataclass(frozen=True)
class Library:
    """One ELF file."""

    path: str  # in the wheel
    size: int
    sha256: str  # hex
    dynamic: Dynamic
    images: tuple[Image, ...]
    launches: Mapping[str, tuple[Launch, ...]]  # the kernel facts of a library, by row
    file: elf.Elf

    @property
    def folder(self) -> str:
        """Where it is in the wheel."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True)
class Wheel:
    """All of it."""

    path: Path
    name: archive.Name
    size: int
    entries: tuple[Entry, ...]  # in the archive's order, duplicates kept
    files: Mapping[str, bytes]  # the content of the small members, by name
    texts: Mapping[str, str]  # the members that are read as text, by name
    libraries: tuple[Library, ...]
    damaged: tuple[str, ...]  # why the archive, or a library in it, could not be read

    @property
    def info(self) -> str:
        """The folder of the wheel's metadata."""
        return f"{self.name.distribution}-{self.name.version}.dist-info"

    @property
    def platforms(self) -> list[str]:
        """What the name says it runs on: ["manylinux_2_28_x86_64"]."""
        return self.name.tag.rpartition("-")[2].split(".")

    def metadata(self, file: str) -> str | None:
        """The text of a file of the dist-info."""
        return self.texts.get(f"{self.info}/{file}")

    @property
    def manifests(self) -> dict[str, str]:
        """The text of every manifest in a folder of libraries, by that folder."""
        suffix = f"/{manifests.FILE_NAME}"
        beside = {library.folder for library in self.libraries}
        declared = set(self.entry_points.values())
        return {
            name.removesuffix(suffix): text
            for name, text in self.texts.items()
            if name.endswith(suffix) and name.removesuffix(suffix) in beside | declared
        }

    @property
    def entry_points(self) -> dict[str, str]:
        """Kind of binary -> folder, of the group <project>.binaries."""
        groups = entry_points.parse(self.metadata("entry_points.txt") or "")
        return {
            name: value
            for group, entries in groups.items()
            for name, value in entries
            if group.endswith(".binaries")
        }


def gather(path: Path) -> Wheel:
    """Read the wheel at `path`; PackagingError when there is none.

    A damaged archive is a fact, not an error. Nothing is written anywhere.
    """
    if not path.is_file():
        raise PackagingError(f"{path}: expected a wheel, found no file; correct the path")
    name = archive.parse_name(path.name)
    entries: list[Entry] = []
    files: dict[str, bytes] = {}
    texts: dict[str, str] = {}
    libraries: list[Library] = []
    damaged: list[str] = []
    try:
        members = zip_file.members(path)
    except PackagingError as error:
        members, damaged = [], [str(error).removeprefix(f"{path}: ")]
    for member in members:
        try:
            content = member.read()
            digest = hashlib.sha256(content)
            why_not = zip_file.why_not_canonical(member)
            entries.append(Entry(member.name, why_not, member.mode, len(content), digest.digest()))
            if content.startswith(elf.ANY_MAGIC):
                libraries.append(read_library(member.name, content, digest.hexdigest()))
            elif len(content) <= _KEPT_BYTES:
                files[member.name] = content
            if _is_text(member.name) and len(content) > _TEXT_BYTES:
                damaged.append(
                    f"{member.name}: expected at most {_TEXT_BYTES:,} bytes, found {len(content):,}"
                )
            elif _is_text(member.name):
                texts[member.name] = content.decode("utf-8")
        except UnicodeDecodeError as error:
            damaged.append(f"{member.name}: expected UTF-8, found: {error}")
        except PackagingError as error:
            damaged.append(f"expected a whole zip archive, found {error}")
        except BuildError as error:
            damaged.append(str(error))
    return Wheel(
        path=path,
        name=name,
        size=path.stat().st_size,
        entries=tuple(entries),
        files=files,
        texts=texts,
        libraries=tuple(libraries),
        damaged=tuple(damaged),
    )


def _is_text(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return file == manifests.FILE_NAME or (folder.endswith(".dist-info") and file in _METADATA)


def read_library(path: str, content: bytes, sha256: str) -> Library:
    """The library at `path` of a wheel; BuildError when it cannot be read."""
    file = elf.parse(content, path)
    device = [section for name in fatbin.SECTIONS for section in file.named(name)]
    facts = [one.content for one in file.sections if one.name.endswith(_FACTS_SUFFIX)]
    return Library(
        path=path,
        size=len(content),
        sha256=sha256,
        dynamic=dynamic.read(file, path),
        images=tuple(
            _image(image, path)
            for section in device
            for image in fatbin.images(section.content, path)
        ),
        launches=kernel_facts.parse(b"".join(map(bytes, facts)), path),
        file=file,
    )


def _image(image: fatbin.Image, where: str) -> Image:
    plain = Image(
        kind=image.kind,
        code=image.code,
        form=image.form,
        entry_code=image.code,
        entry_form=image.form,
        entry_flags=image.flags,
        entry_words=image.words,
        compression=image.compression,
        stored_bytes=len(image.stored),
        opened_bytes=image.opened_bytes,
        functions=None,
    )
    opened = image.opened() if image.kind in (fatbin.SASS, fatbin.PTX) else None
    if opened is None:
        return plain
    if image.kind == fatbin.PTX:
        text = ptx.read(opened, where)
        return replace(plain, code=text.code, form=text.version, kernels=text.kernels)
    held = cubin.read(opened, where)
    # What the machine code says of itself counts, not its entry. Where ptxas left no note, only the
    # entry knows of an "a".
    return replace(
        plain,
        code=held.code or f"{held.number}{image.code.lstrip('0123456789')}",
        form=(_CUBIN, held.abi),
        functions=held.functions,
        toolkit=held.toolkit,
        stack=held.stack,
        api=held.api,
        embedded=device_code.within(opened, start=1),
        before_13=held.before_13,
        differences=held.differences,
    )
