"""Plants one fault each in a whole wheel of the factory, which has no other."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fake_artifacts
from fake_artifacts import Image, Library, Wheel
from fake_elf import LOADED, Segment

from flashvar.binaries.manifest import Manifest
from flashvar_factory.audit import expectations
from flashvar_factory.audit.expectations import Expectations
from flashvar_factory.config import schema
from flashvar_factory.inspect import archive
from flashvar_factory.inspect import elf as elf_file

Plant = Callable[[Path], Path]

ROOT = Path(__file__).parents[2]
VARIANTS = schema.read(ROOT / "variants.toml")
# Two kernels of most ops, as an audit reads every one: of one dtype, and of head dims of which one
# may spill.
CONFIG = replace(
    VARIANTS,
    defaults={
        op: {
            axis: tuple(value for value in values if value in (values[0], 128))
            for axis, values in axes.items()
        }
        for op, axes in VARIANTS.defaults.items()
    },
)
STEM, INFO = "flashvar_sm80", "flashvar_sm80-0.1.0.dist-info"
LIBRARY, MANIFEST = f"{STEM}/lib{STEM}.so", f"{STEM}/manifest.json"
METADATA, WHEEL, RECORD = (f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD"))
ENTRIES, SBOM = f"{INFO}/entry_points.txt", f"{INFO}/sboms/flashvar-sm80.cdx.json"

Files = dict[str, bytes]


@cache
def described() -> Manifest:
    """The kernels of one architecture."""
    return fake_artifacts.complete(CONFIG, "sm_80")


def expected() -> Expectations:
    return expectations.of(CONFIG)


def library(**changes: Any) -> Wheel:
    """The wheel with another library."""
    one: Library = replace(fake_artifacts.library(described()), **changes)
    return Wheel(described(), one)


def later(make: Callable[..., Wheel], *given: object) -> Plant:
    """The wheel, made where its test runs: it takes as long as many tests."""
    return lambda folder: make(*given).write(folder)


def device(*images: Image) -> Wheel:
    """The wheel with other device code."""
    return Wheel(described(), fake_artifacts.library(described(), *images))


def own() -> list[Image]:
    return fake_artifacts.images("80", described())


def first(**changes: Any) -> Image:
    """The image of the first kernel, with other facts."""
    return Image("80", fake_artifacts.device_code(described().kernels[0], "80", **changes))


def manifest(**changes: Any) -> Wheel:
    """The wheel with a manifest that differs, and a library that does not."""
    return Wheel(replace(described(), **changes), fake_artifacts.library(described()))


@cache
def for_older_drivers() -> Manifest:
    """The same kernels, with machine code of CUDA 12."""
    return fake_artifacts.complete(CONFIG, "sm_80-cu12")


def older(compression: str | None = None, **changes: Any) -> Wheel:
    """The wheel for older drivers, with other images and a manifest that differs."""
    one = for_older_drivers()
    images = [replace(image, compression=compression) for image in fake_artifacts.images("80", one)]
    library = fake_artifacts.library(one, *images)
    return Wheel(replace(one, **changes), library, "flashvar_sm80_cu12")


def row(of: str | None = None, /, **changes: Any) -> Wheel:
    """The same of one kernel, the first where none is named."""
    kernels = described().kernels
    name = of or kernels[0].name
    return manifest(
        kernels=tuple(replace(one, **changes) if one.name == name else one for one in kernels)
    )


def with_files(**more: bytes | str) -> Wheel:
    """The wheel with these files beside the others, or instead of them."""
    found = {name: text.encode() if isinstance(text, str) else text for name, text in more.items()}
    return Wheel(described(), more=found)


@cache
def right() -> Mapping[str, bytes]:
    """The files of the wheel without a fault."""
    return Wheel(described()).files()


def edited(name: str, old: str, new: str) -> Wheel:
    """The wheel with other text in a file."""
    text = right()[name].decode()
    assert old in text
    return with_files(**{name: text.replace(old, new, 1)})


def added(name: str, content: bytes = b"x") -> Wheel:
    return with_files(**{name: content})


def without(name: str) -> Callable[[Path], Path]:
    """The wheel without a file."""

    def plant(folder: Path) -> Path:
        wheel = Wheel(described())
        files = {key: value for key, value in wheel.files().items() if key != name}
        path = wheel.write(folder)
        archive.write(path, files, INFO)
        return path

    return plant


def sbom(change: Callable[[Any], None]) -> Wheel:
    """The wheel with another SBOM."""
    document = json.loads(right()[SBOM])
    change(document)
    return with_files(**{SBOM: json.dumps(document, indent=1) + "\n"})


def called(name: str) -> Callable[[Path], Path]:
    """The wheel under another file name."""
    return lambda folder: Wheel(described()).write(folder).rename(folder / name)


def zipped(change: Callable[[zipfile.ZipFile, Files], None]) -> Callable[[Path], Path]:
    """The wheel as an archive that `change` writes."""

    def plant(folder: Path) -> Path:
        path = Wheel(described()).write(folder)
        files = archive.read(path)
        with zipfile.ZipFile(path, "w") as opened:
            change(opened, files)
        return path

    return plant


def member(name: str, mode: int = 0o100644, content: bytes = b"", **changes: Any) -> Any:
    """The wheel, and in it a member that is listed in RECORD, with these fields of its header."""

    def change(opened: zipfile.ZipFile, files: Files) -> None:
        for key, value in files.items():
            opened.writestr(member_info(key), value, zipfile.ZIP_DEFLATED)
        info = member_info(name, mode)
        for key, value in changes.items():
            setattr(info, key, value)
        opened.writestr(info, content, changes.get("compress_type", zipfile.ZIP_STORED))

    return zipped(change)


def member_info(name: str, mode: int = 0o100644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def bytes_of(change: Callable[[bytearray], bytes | bytearray | None]) -> Callable[[Path], Path]:
    """The wheel with other bytes."""

    def plant(folder: Path) -> Path:
        path = Wheel(described()).write(folder)
        content = bytearray(path.read_bytes())
        path.write_bytes(change(content) or content)
        return path

    return plant


def at(offset: int, form: str, value: int) -> Callable[[bytearray], None]:
    """Writes a number into an archive; negative offsets are of its end record."""

    def change(content: bytearray) -> None:
        struct.pack_into(form, content, offset if offset >= 0 else len(content) + offset, value)

    return change


def record(change: Callable[[list[str]], list[str] | str]) -> Callable[[Path], Path]:
    """The wheel with other lines in RECORD."""

    def plant(folder: Path) -> Path:
        path = Wheel(described()).write(folder)
        files = archive.read(path)
        lines = change(files[RECORD].decode().splitlines())
        files[RECORD] = (lines if isinstance(lines, str) else "\n".join(lines)).encode()
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
            for name, content in files.items():
                opened.writestr(member_info(name), content)
        return path

    return plant


def elf(offset: int, form: str, value: int) -> Wheel:
    """The wheel with another number in its library's header."""
    wheel = Wheel(described())
    content = bytearray(wheel.files()[LIBRARY])
    struct.pack_into(form, content, offset, value)
    return with_files(**{LIBRARY: bytes(content)})


def fatbin(offset: int, form: str, value: int) -> Wheel:
    """The wheel with another number in the header of its first container, or of its entry."""
    one = fake_artifacts.library(described())
    content = bytearray(one.fatbin)
    struct.pack_into(form, content, offset, value)
    return library(fatbin=bytes(content))


def stated(architecture: str, version: str) -> str:
    """What a library states of its build."""
    document = {"architecture": architecture, "version": version, "source_hash": "0" * 64}
    return json.dumps(document) + "\0"


def of_sbom(**changes: Any) -> Wheel:
    """The wheel with other facts of its own component."""
    return sbom(lambda document: document["metadata"]["component"].update(changes))


def of_part(name: str, **changes: Any) -> Wheel:
    """The wheel with another component of that name."""

    def change(document: Any) -> None:
        for one in document["components"]:
            if one["name"] == name:
                one.update(changes)

    return sbom(change)


class Built(fake_artifacts.Library):
    """A library that is changed after it is built."""

    change: Callable[[bytearray], object]

    def build(self, stem: str = STEM) -> bytes:
        content = bytearray(super().build(stem))
        self.change(content)
        return bytes(content)


def built(change: Callable[[bytearray], object]) -> Wheel:
    """The wheel whose library has other bytes, and a manifest that states their hash."""
    one = Built(**vars(fake_artifacts.library(described())))
    object.__setattr__(one, "change", change)
    return Wheel(described(), one)


def number(form: str, offset: int, value: int) -> Wheel:
    """The same with a number in its header."""
    return built(lambda content: struct.pack_into(form, content, offset, value))


def inside(section: str, form: str, offset: int, value: int) -> Wheel:
    """The same with a number in a section."""

    def change(content: bytearray) -> None:
        (found,) = elf_file.parse(bytes(content), "library").named(section)
        struct.pack_into(form, content, found.offset + offset, value)

    return built(change)


def segments(kind: int, **changes: Any) -> tuple[Segment, ...]:
    return tuple(one._replace(**changes) if one.kind == kind else one for one in LOADED)


def field(path: str, value: object) -> Wheel:
    """The wheel whose SBOM has one field more, or another value in it."""

    def change(document: Any) -> None:
        *folders, last = path.split(".")
        for folder in folders:
            document = document[int(folder) if folder.isdecimal() else folder]
        document[last] = value

    return sbom(change)
