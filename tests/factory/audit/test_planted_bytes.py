"""Faults in the bytes of a wheel that few tools show: headers, tables, fields that readers skip.

The table goes on from test_planted.py: a row is a fault, how it is planted, and a part
of the sentence that reports it.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fake_artifacts
import fake_elf
import planted
import pytest
from audited import faults
from fake_artifacts import Wheel
from fake_elf import Section, Segment
from planted import ENTRIES, MANIFEST, METADATA, RECORD, STEM, described

from flashvar_factory.inspect import archive, elf

pytestmark = pytest.mark.usefixtures("auditwheel")

Fault = tuple[Wheel | planted.Plant, str]
BIND_NOW = (30, 8)
# Where a field is in a central and in a local header of an archive.
FIELDS = {"needed": (6, 4), "flags": (8, 6), "time": (12, 10), "date": (14, 12)}


def each(change: Callable[[zipfile.ZipInfo], object]) -> planted.Plant:
    """The wheel with other fields in the header of every member."""

    def plant(folder: Path) -> Path:
        path = Wheel(described()).write(folder)
        files = archive.read(path)
        with zipfile.ZipFile(path, "w") as opened:
            for name, content in files.items():
                info = planted.member_info(name)
                change(info)
                opened.writestr(info, content, zipfile.ZIP_DEFLATED)
        return path

    return plant


def attributes(value: int, system: int = 3) -> planted.Plant:
    """The wheel whose manifest has these attributes, by a system."""

    def change(info: zipfile.ZipInfo) -> None:
        if info.filename == MANIFEST:
            info.external_attr, info.create_system = value, system

    return each(change)


def header(field: str, value: int) -> planted.Plant:
    """The wheel with another number in both headers of its first member."""

    def plant(folder: Path) -> Path:
        path = Wheel(described()).write(folder)
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as opened:
            places = opened.start_dir, opened.infolist()[0].header_offset
        for place, offset in zip(places, FIELDS[field], strict=True):
            struct.pack_into("<H", content, place + offset, value)
        path.write_bytes(content)
        return path

    return plant


def internal(content: bytearray) -> None:
    """Sets the internal attributes of the first member."""
    (start,) = struct.unpack_from("<I", content, len(content) - 6)
    struct.pack_into("<H", content, start + 36, 0xFFFF)


def many_sections(content: bytearray) -> None:
    """As many as a header counts, of names that differ: all the same table at the end."""
    (start,) = struct.unpack_from("<Q", content, 40)
    (count,) = struct.unpack_from("<H", content, 60)
    row = content[start : start + 64]
    content += bytes(row) * (0xFFF0 - count)
    struct.pack_into("<H", content, 60, 0xFFF0)


def tags(*more: tuple[int, int]) -> Wheel:
    """The wheel with more entries in its dynamic section."""
    return planted.library(tags=(BIND_NOW, *more))


def lines(change: Callable[[list[str]], list[str] | str]) -> planted.Plant:
    return planted.record(change)


ARCHIVE: Mapping[str, Fault] = {
    "file that is a folder to DOS": (attributes(0o100644 << 16 | 0x10), "attributes of a folder"),
    "file that is a volume to DOS": (attributes(0o100644 << 16 | 0x08), "attributes of a folder"),
    "link made by DOS": (attributes(0o120777 << 16, 0), "found a symbolic link"),
    "link made by macOS": (attributes(0o120777 << 16, 19), "found a symbolic link"),
    "set user by DOS": (attributes(0o104755 << 16, 0), "the mode -rwsr-xr-x"),
    "read by nobody": (attributes(0o100000 << 16), "the mode ----------"),
    "executed by all, read by nobody": (attributes(0o100111 << 16), "the mode ---x--x--x"),
    "version of the format": (header("needed", 99), "a header that no reader accepts: version 99"),
    "month that is none": (header("date", 0), "a header that no reader accepts"),
    "month 15": (header("date", 0xFFFF), "a header that no reader accepts"),
    "30 February": (header("date", 46 << 9 | 2 << 5 | 30), "a header that no reader accepts"),
    "31 April": (header("date", 46 << 9 | 4 << 5 | 31), "a header that no reader accepts"),
    "second 62": (header("time", 0xFFFF), "a header that no reader accepts"),
    "data that is patched": (header("flags", 0x20), "encryption or a data descriptor"),
    "internal attributes": (planted.bytes_of(internal), "internal attributes 0xffff"),
    "name of 60,000 letters": (planted.member("a" * 60_000), "longer than systems take"),
    "part of 300 letters": (planted.member("a" * 300), "longer than systems take"),
}

RECORDS: Mapping[str, Fault] = {
    "no row of itself": (
        lines(lambda rows: [row for row in rows if not row.startswith(RECORD)]),
        "expected a row without hash and size, found no row",
    ),
    "blank line": (
        lines(lambda rows: [rows[0], "", *rows[1:]]),
        "expected three fields in a row, found 0",
    ),
    "lines that end in a vertical tab": (
        lines(lambda rows: "\x0b".join(rows)),
        "expected lines that end with a line feed, found other",
    ),
    "lines that end in a carriage return": (
        lines(lambda rows: "\r".join(rows)),
        "expected lines that end with a line feed, found other",
    ),
    "hash of another kind": (
        lines(lambda rows: [rows[0].replace("sha256", "sha512"), *rows[1:]]),
        "expected its SHA-256 in RECORD, found 'sha512=",
    ),
}

OF_METADATA: Mapping[str, Fault] = {
    "name in capitals": (
        planted.edited(METADATA, "Name: flashvar-sm80", "Name: FlashVar_SM80"),
        "expected name, as its manifest writes it, 'flashvar-sm80', found 'FlashVar_SM80'",
    ),
    "version spelled otherwise": (
        planted.edited(METADATA, "\nVersion: 0.1.0", "\nVersion: v0.1.0"),
        "expected version '0.1.0', found 'v0.1.0'",
    ),
    "variant of Markdown": (
        planted.edited(METADATA, "text/markdown", "text/markdown; variant=CommonMark"),
        "expected content type of the description 'text/markdown'",
    ),
    "group twice": (
        planted.added(
            ENTRIES, f"[flashvar.binaries]\nsm_80 = {STEM}\n[flashvar.binaries]\n".encode()
        ),
        "by which flashvar finds it",
    ),
    **{
        f"also for {tag}": (
            Wheel(described(), platform=f"{tag}.manylinux_2_28_x86_64"),
            sentence,
        )
        for tag, sentence in {
            "win_amd64": "expected a manylinux tag, found win_amd64, which PyPI",
            "linux_x86_64": "expected a manylinux tag, found linux_x86_64, which PyPI",
            "any": "expected a manylinux tag, found any, which PyPI",
            "musllinux_1_2_x86_64": "expected a manylinux tag, found musllinux_1_2_x86_64",
            "manylinux_2_28_aarch64": "expected a platform tag for x86_64, found manylinux_2_28",
        }.items()
    },
}


def again(*path: str) -> Wheel:
    """The wheel whose SBOM has the first entry of a list twice."""

    def change(document: Any) -> None:
        for folder in path:
            document = document[folder]
        document.append(document[0])

    return planted.sbom(change)


CUDART = next(
    index
    for index, one in enumerate(fake_artifacts.sbom_of(described())["components"])
    if one["name"] == "cudart-static"
)
STRANGE = "expected unknown fields [], found "
OF_SBOM: Mapping[str, Fault] = {
    "service": (planted.field("services", [{"name": "x"}]), f"{STRANGE}['services']"),
    "vulnerability": (
        planted.field("vulnerabilities", [{"id": "x"}]),
        f"{STRANGE}['vulnerabilities']",
    ),
    "address": (planted.field("externalReferences", []), f"{STRANGE}['externalReferences']"),
    "tools": (planted.field("metadata.tools", []), f"{STRANGE}['metadata.tools']"),
    "supplier": (
        planted.field("metadata.component.supplier", {"name": "x"}),
        f"{STRANGE}['metadata.component.supplier']",
    ),
    "hash of the wheel": (
        planted.field("metadata.component.hashes", []),
        f"{STRANGE}['metadata.component.hashes']",
    ),
    "component within a component": (
        planted.field(f"components.{CUDART}.components", [{"name": "openssl"}]),
        f"{STRANGE}['components.components']",
    ),
    "list in place of a text": (
        planted.field(f"components.{CUDART}.version", ["13.0"]),
        "as this factory writes it",
    ),
    "second hash": (
        planted.field(
            f"components.{CUDART}.hashes",
            [{"alg": "SHA-256", "content": "e" * 64}, {"alg": "MD5", "content": "0" * 32}],
        ),
        "expected hashes of cudart-static 'one SHA-256'",
    ),
    "second hash of the library": (
        planted.field(
            "metadata.component.components.0.hashes",
            [{"alg": "SHA-256", "content": "e" * 64}, {"alg": "MD5", "content": "0" * 32}],
        ),
        "expected library",
    ),
    "purl of somebody else": (
        planted.field(f"components.{CUDART}.purl", "pkg:pypi/evil@1"),
        "expected kind, license and purl of cudart-static",
    ),
    "license of somebody else": (
        planted.field(f"components.{CUDART}.licenses", [{"expression": "MIT"}]),
        "expected kind, license and purl of cudart-static",
    ),
    "kind of component": (
        planted.field(f"components.{CUDART}.type", "application"),
        "expected kind, license and purl of cudart-static",
    ),
    "reference": (
        planted.field("metadata.component.bom-ref", "x"),
        "expected bom-ref of flashvar-sm80",
    ),
    "version of the document": (
        planted.field("version", "x"),
        "expected version of the document '1'",
    ),
    "property twice": (
        again("metadata", "component", "properties"),
        "expected number of properties 2",
    ),
    "dependency twice": (again("dependencies"), "expected number of dependencies"),
}

OF_LIBRARY: Mapping[str, Fault] = {
    "function outside": (
        planted.inside(".dynsym", "<Q", 24 * 2 + 8, 0xDEADBEEF),
        "to be a global function, found another symbol",
    ),
    "function at zero": (
        planted.inside(".dynsym", "<Q", 24 * 2 + 8, 0),
        "to be a global function, found another symbol",
    ),
    "function twice": (
        planted.library(
            exported=(*fake_artifacts.library(described()).exported, "flashvar_abi_version")
        ),
        "expected one symbol flashvar_abi_version, found 2",
    ),
    "function with a version that is hidden": (
        planted.inside(".gnu.version", "<H", 2 * 2, 0x8001),
        "without a symbol version, found one",
    ),
    "code that is not executable": (
        planted.library(segments=planted.segments(elf.LOAD, flags=4)),
        "to be a global function, found another symbol",
    ),
    "debug information": (
        planted.library(more=(Section(".debug_info", 1, b"/home/somebody"),)),
        "expected no debug information, found .debug_info",
    ),
    "debug information in another file": (
        planted.library(more=(Section(".gnu_debuglink", 1, b"evil"),)),
        "expected no debug information, found .gnu_debuglink",
    ),
    "segment of nobody": (
        planted.library(segments=(*fake_elf.LOADED, Segment(0x60000005, 4, ".rodata"))),
        "expected known segments, found one of type 0x60000005",
    ),
    "relocations of another kind": (
        tags((17, 64), (18, 16), (19, 16)),
        "expected known entries in the dynamic section, found the tag 0x11",
    ),
    "relocated code by a flag": (
        planted.library(tags=((30, 8 | 4),)),
        "flags 0x8 in dynamic entry 0x1e",
    ),
    "symbolic": (planted.library(tags=((30, 8 | 2),)), "flags 0x8 in dynamic entry 0x1e"),
    "never opened": (tags((0x6FFFFFFB, 0x41)), "flags 0x1 in dynamic entry 0x6ffffffb, found 0x41"),
    "interposes": (tags((0x6FFFFFFB, 0x401)), "flags 0x1 in dynamic entry 0x6ffffffb, found 0x401"),
    "program by a flag": (tags((0x6FFFFFFB, 0x8000001)), "in dynamic entry 0x6ffffffb"),
    "flags twice": (planted.library(tags=((30, 4), (30, 4))), "expected one dynamic entry 0x1e"),
    "size of a symbol": (tags((11, 8)), "expected 24 in dynamic entry 0xb, found 8"),
    "versions that are needed, elsewhere": (
        tags((0x6FFFFFFE, 64)),
        "expected one dynamic entry 0x6ffffffe, found 2",
    ),
    "hash table elsewhere": (
        tags((0x6FFFFEF5, 64)),
        "expected dynamic entry 0x6ffffef5 to be the address of its section",
    ),
    "relocations elsewhere": (
        tags((7, 64), (8, 24)),
        "expected relocation sections at DT_RELA and DT_JMPREL",
    ),
    "start elsewhere": (
        tags((12, 1 << 40)),
        "expected dynamic entry 0xc at .init, found it at",
    ),
    "functions of the start elsewhere": (
        tags((25, 64), (27, 8)),
        "expected dynamic entry 0x1b to be the size of its section",
    ),
    "needed twice": (
        planted.library(needed=("libc.so.6", "libc.so.6")),
        "expected each needed library once",
    ),
    "versions of what it does not need": (
        planted.inside(".gnu.version_r", "<I", 4, 1),
        "expected symbol versions of needed libraries alone, found",
    ),
    "another system": (
        planted.number("<B", 7, 9),
        "expected the ELF header of a shared library for Linux",
    ),
    "another ABI": (
        planted.number("<B", 8, 9),
        "expected the ELF header of a shared library for Linux",
    ),
    "another version": (
        planted.number("<I", 20, 7),
        "expected the ELF header of a shared library for Linux",
    ),
    "another version of the header": (
        planted.number("<B", 6, 7),
        "expected a 64-bit little-endian ELF",
    ),
    "flags": (planted.number("<I", 48, 1), "expected the ELF header of a shared library for Linux"),
    "relocations that stay writable": (
        planted.library(segments=planted.segments(elf.GNU_RELRO, section=".rodata")),
        "expected full RELRO",
    ),
    "segment within a segment": (
        planted.library(segments=(*fake_elf.LOADED, Segment(elf.LOAD, 5, ".text"))),
        "expected no segments that overlap",
    ),
    "segment beside its pages": (
        planted.number("<Q", 64 + 16, 16),
        "expected p_vaddr = p_offset modulo 4096, found a segment at 0x10",
    ),
    "65,520 sections": (planted.built(many_sections), "expected"),
}

FAULTS = {
    f"{table}: {name}": fault
    for table, rows in {
        "archive": ARCHIVE,
        "record": RECORDS,
        "metadata": OF_METADATA,
        "sbom": OF_SBOM,
        "library": OF_LIBRARY,
    }.items()
    for name, fault in rows.items()
}


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | planted.Plant, sentence: str, tmp_path: Path) -> None:
    path = plant.write(tmp_path) if isinstance(plant, Wheel) else plant(tmp_path)
    found = faults(path, planted.expected())
    assert any(sentence in fault for fault in found), found
