"""What is in a wheel? Everything that the checks judge, gathered once, in memory."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar.binaries import manifest
from flashvar_factory import archive, elf, manifest_writer
from flashvar_factory.audit import cubin, dynamic, fatbin
from flashvar_factory.audit.dynamic import Dynamic
from flashvar_factory.errors import BuildError, PackagingError

_METADATA: Final = ("RECORD", "entry_points.txt", "variant.json")
_RECORDS_SUFFIX: Final = ".kernels"  # of the section of kernel facts: .<project>.kernels
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError)


@dataclass(frozen=True)
class Entry:
    """One member of the archive."""

    name: str
    mode: int  # of Unix, 0 where the archive says nothing
    size: int
    sha256: bytes


@dataclass(frozen=True)
class Image:
    """One image of device code."""

    kind: str  # "sass", "ptx"
    code: str  # "90a"
    compression: str | None
    stored_bytes: int
    opened_bytes: int
    functions: tuple[cubin.Function, ...] | None  # None: PTX, or compressed in a way not opened


@dataclass(frozen=True)
class Library:
    """One ELF file."""

    path: str  # in the wheel
    size: int
    sha256: str  # hex
    dynamic: Dynamic
    images: tuple[Image, ...]
    kernels: tuple[str, ...] | None  # that a library of this factory says it launches

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
        """The text of every manifest that has a place beside libraries, by its folder."""
        suffix = f"/{manifest.FILE_NAME}"
        beside = {library.folder for library in self.libraries}
        declared = set(self.entry_points.values())
        return {
            name.removesuffix(suffix): text
            for name, text in self.texts.items()
            if name.endswith(suffix) and name.removesuffix(suffix) in beside | declared
        }

    @property
    def entry_points(self) -> dict[str, str]:
        """Architecture -> folder, of the group <project>.binaries."""
        group, found = "", {}
        for line in (self.metadata("entry_points.txt") or "").splitlines():
            if line.startswith("["):
                group = line.strip("[] ")
            elif "=" in line and group.endswith(".binaries"):
                name, _, value = line.partition("=")
                found[name.strip()] = value.strip()
        return found


def gather(path: Path) -> Wheel:
    """Read the wheel at `path`; PackagingError when there is none.

    A damaged archive is a fact, not an error. Nothing is written anywhere.
    """
    if not path.is_file():
        raise PackagingError(f"{path}: expected a wheel, found no file")
    entries: list[Entry] = []
    texts: dict[str, str] = {}
    libraries: list[Library] = []
    damaged: list[str] = []
    try:
        with zipfile.ZipFile(path) as opened:
            for info in opened.infolist():
                content = opened.read(info)
                digest = hashlib.sha256(content)
                mode = info.external_attr >> 16
                entries.append(Entry(info.filename, mode, len(content), digest.digest()))
                if _is_text(info.filename):
                    texts[info.filename] = content.decode(errors="replace")
                elif content.startswith(elf.MAGIC):
                    libraries.append(_library(info.filename, content, digest.hexdigest()))
    except _UNREADABLE as error:
        damaged.append(f"expected a whole zip archive, found: {error}")
    except BuildError as error:
        damaged.append(str(error))
    return Wheel(
        path=path,
        name=archive.parse_name(path.name),
        size=path.stat().st_size,
        entries=tuple(entries),
        texts=texts,
        libraries=tuple(libraries),
        damaged=tuple(damaged),
    )


def _is_text(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return file == manifest.FILE_NAME or (folder.endswith(".dist-info") and file in _METADATA)


def _library(path: str, content: bytes, sha256: str) -> Library:
    file = elf.parse(content, path)
    sections = {section.name: section.content for section in file.sections}
    device = [sections[name] for name in fatbin.SECTIONS if name in sections]
    records = [bytes(text) for name, text in sections.items() if name.endswith(_RECORDS_SUFFIX)]
    return Library(
        path=path,
        size=len(content),
        sha256=sha256,
        dynamic=dynamic.read(file, path),
        images=tuple(
            _image(image, path) for section in device for image in fatbin.images(section, path)
        ),
        kernels=tuple(manifest_writer.parse_facts(records[0], path)) if records else None,
    )


def _image(image: fatbin.Image, where: str) -> Image:
    opened = image.opened() if image.kind == fatbin.SASS else None
    held = None if opened is None else cubin.read(opened, where)
    # What the machine code says of itself counts, not its entry; only the entry knows of an "a".
    suffix = image.code.lstrip("0123456789")
    return Image(
        kind=image.kind,
        code=image.code if held is None else f"{held.number}{suffix}",
        compression=image.compression,
        stored_bytes=len(image.stored),
        opened_bytes=image.opened_bytes,
        functions=None if held is None else held.functions,
    )
