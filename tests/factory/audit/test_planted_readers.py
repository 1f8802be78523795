"""Faults that one reader of a wheel sees and another does not: tables twice, data behind data.

The table goes on from test_planted.py: a row is a fault, how it is planted, and a part
of the sentence that reports it.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fake_artifacts
import fake_elf
import planted
import pytest
import zstandard
from audited import Fault, check_found_at_once, faults, rows
from fake_artifacts import Image, Wheel
from fake_elf import Section, Segment
from planted import INFO, LIBRARY, MANIFEST, RECORD, STEM, described

from flashvar_factory.audit import platform_tag
from flashvar_factory.inspect import archive, elf

pytestmark = pytest.mark.usefixtures("auditwheel")

Change = Callable[[bytearray, elf.Elf], object]
LICENSE, TEXT = f"{INFO}/licenses/LICENSE", b"Apache\n"
FIRST = described().kernels[0]
BIND_NOW = (30, 8)


def attributes(value: int) -> planted.Plant:
    """The wheel whose manifest has these attributes."""

    def change(opened: zipfile.ZipFile, files: planted.Files) -> None:
        for name, content in files.items():
            info = planted.member_info(name)
            info.external_attr = value if name == MANIFEST else info.external_attr
            opened.writestr(info, content, zipfile.ZIP_DEFLATED)

    return planted.zipped(change)


def deflated(raw: bytes, size: int = len(TEXT)) -> planted.Plant:
    """The wheel whose license is deflated to these bytes."""

    def plant(folder: Path) -> Path:
        path = Wheel(described()).write(folder)
        files = archive.read(path)
        with zipfile.ZipFile(path, "w") as opened:
            for name, content in files.items():
                opened.writestr(planted.member_info(name), raw if name == LICENSE else content)
        with zipfile.ZipFile(path) as opened:
            local = opened.getinfo(LICENSE).header_offset
        data = bytearray(path.read_bytes())
        # Method, CRC and size, in both headers.
        for place in (local + 8, data.rindex(LICENSE.encode()) - 46 + 10):
            struct.pack_into("<H", data, place, zipfile.ZIP_DEFLATED)
            struct.pack_into("<I", data, place + 6, zlib.crc32(TEXT))
            struct.pack_into("<I", data, place + 14, size)
        path.write_bytes(data)
        return path

    return plant


def deflate(content: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def with_zip64(content: bytearray) -> bytes:
    """The archive with the end record of large archives too, which says that it is empty."""
    end = len(content) - 22
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 0, 0, 0, end)
    place = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    return bytes(content[:end] + record + place + content[end:])


def listed(row: str, *folders: str) -> planted.Plant:
    """The wheel with members for folders, and a row more in RECORD."""

    def change(opened: zipfile.ZipFile, files: planted.Files) -> None:
        for name in folders:
            opened.writestr(planted.member_info(name, 0o40755), b"")
        for name, content in files.items():
            more = row.encode() if name == RECORD else b""
            opened.writestr(planted.member_info(name), content + more)

    return planted.zipped(change)


def deep(opened: zipfile.ZipFile, files: planted.Files) -> None:
    """Members in very many folders."""
    for name in files:
        opened.writestr(planted.member_info(name), files[name])
    for number in range(150):
        opened.writestr(planted.member_info(f"{number}/{'a/' * 2040}b"), b"")


def changed(change: Change, *more: Section, **others: Any) -> Wheel:
    """The wheel whose library has more sections, and is changed; where all is, is known."""
    one = planted.Built(**{**vars(fake_artifacts.library(described())), "more": more, **others})
    object.__setattr__(one, "change", lambda data: change(data, elf.parse(bytes(data), "library")))
    return Wheel(described(), one)


def header(data: bytearray, file: elf.Elf, name: str) -> int:
    """Where the header of a section is."""
    (start,) = struct.unpack_from("<Q", data, 40)
    return int(start) + 64 * [one.name for one in file.sections].index(name)


def of_header(name: str, offset: int, form: str, value: int) -> Wheel:
    """The wheel with another number in the header of a section of its library."""
    return changed(
        lambda data, file: struct.pack_into(form, data, header(data, file, name) + offset, value)
    )


def section(name: str) -> elf.Section:
    """A section of the library without a fault."""
    built = fake_artifacts.library(described()).build()
    return elf.parse(built, "library").named(name)[0]


def other_names(victim: str, old: bytes, new: bytes) -> Wheel:
    """The wheel where a table names a copy of its strings, and the loader's strings are others."""

    def change(data: bytearray, file: elf.Elf) -> None:
        real, copy = file.named(".dynstr")[0], file.named(".copy")[0]
        data[copy.offset : copy.offset + copy.size] = real.content
        number = [one.name for one in file.sections].index(".copy")
        struct.pack_into("<I", data, header(data, file, victim) + 40, number)
        place = data.index(old, real.offset)
        data[place : place + len(new)] = new

    return changed(change, Section(".copy", 3, bytes(section(".dynstr").size)))


def other_dynamic(data: bytearray, file: elf.Elf) -> None:
    """Readers of sections find a copy of the dynamic section first; the loader's has a run path."""
    real, copy = file.named(".dynamic")[0], file.named(".copy")[0]
    data[copy.offset : copy.offset + copy.size] = real.content
    soname = data.index(struct.pack("<q", 14), real.offset)
    struct.pack_into("<q", data, soname, 29)
    first, second = (header(data, file, name) for name in (".dynamic", ".copy"))
    rows = bytes(data[first : first + 64]), bytes(data[second : second + 64])
    data[second : second + 64], data[first : first + 64] = rows


def as_long(name: str, content: bytes) -> Wheel:
    """The wheel whose library has a section with this content, at the end of the file."""

    def change(data: bytearray, file: elf.Elf) -> None:
        place = header(data, file, name) + 24
        struct.pack_into("<QQ", data, place, len(data), len(content))
        data += content

    return changed(change)


def noisy(row: bytes, count: int = 40_000, times: int = 30) -> bytes:
    """A table of many rows that does not compress too well to be in an archive."""
    return b"".join(row * count + os.urandom(len(row) * 500) for _ in range(times))


def relocations(*rows: tuple[int, int]) -> Wheel:
    """The wheel with relocations: places, and numbers of symbols."""
    content = b"".join(struct.pack("<QQq", place, symbol << 32 | 8, 0) for place, symbol in rows)
    tags = (BIND_NOW, (7, 0), (8, len(content)), (9, 24))
    return planted.library(tags=tags, more=(Section(".rela.dyn", 4, content, 2, 2),))


def cubin(change: Callable[[Section], Section]) -> Wheel:
    """The wheel with other sections in its first image."""
    whole = elf.parse(fake_artifacts.device_code(FIRST, "80"), "cubin")
    parts = [
        Section(one.name, one.kind, bytes(one.content), one.link, one.flags, one.info)
        for one in whole.sections[1:-1]
    ]
    content = fake_elf.elf(fake_elf.CUDA, [*map(change, parts)], whole.flags, 8)
    return planted.device(Image("80", content), *planted.own()[1:])


def longer(name: str, more: bytes) -> Wheel:
    """The same with bytes more in its sections of a name."""
    return cubin(
        lambda one: one._replace(content=one.content + more) if one.name.startswith(name) else one
    )


def note(toolkit: str, code: str) -> Wheel:
    """The same with a second tool in the note of ptxas."""
    text = f"x\0Cuda compilation tools, release 13.0, V{toolkit}\0-arch sm_{code} \0"
    return longer(".note.nv.tkinfo", text.encode())


def frames(before: bytes = b"", behind: bytes = b"") -> Wheel:
    """The wheel with data around the compressed frame of its first image."""
    first, *others = planted.own()
    stored = before + zstandard.ZstdCompressor().compress(first.content) + behind
    padded = stored + bytes(-len(stored) % 8)
    numbers = (2, 0x101, 64, len(padded), len(stored), 0, 8, 1, 80, 0, 0, 0x8000, 0)
    entry = struct.pack("<HHIQIIHHIIIQQQ", *numbers, len(first.content)) + padded
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
    return planted.library(fatbin=container + b"".join(map(fake_artifacts.fatbin, others)))


def many_images(count: int) -> Wheel:
    """The wheel with a container of very many images."""
    entry = struct.pack("<HHIQIIHHIIIQQQ", 2, 0x101, 64, 8, 0, 0, 8, 1, 80, *([0] * 5))
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry + bytes(8)) * count)
    images = b"".join(entry + struct.pack("<Q", ~number % 2**64) for number in range(count))
    return planted.library(fatbin=container + images)


SKIPPED = struct.pack("<II", 0x184D2A50, 8) + b"unread!!"
REGISTERS = struct.pack("<BBHII", 4, 0x2F, 8, 1, 255)
BLOCK = struct.pack("<BBHIII", 4, 0x05, 12, 64, 1, 1)
FRAME = struct.pack("<BBHII", 4, 0x11, 8, 1, 0)
SYMBOL = struct.pack("<IBBHQQ", 1, 0x12, 0, 8, 1, 1)

ARCHIVE: Mapping[str, Fault] = {
    "file that is a link to Windows": (
        attributes(0o100644 << 16 | 0x400),
        "with the attributes of a folder, a volume or a link",
    ),
    "empty blocks before the content": (
        deflated(b"\0\0\0\xff\xff" * 2000 + deflate(TEXT)),
        "of 7 bytes deflated to 10,009: with other data",
    ),
    "bytes behind the deflated data": (deflated(deflate(TEXT) + b"x"), "data behind them"),
    "deflated twice": (deflated(deflate(TEXT) * 2), "data behind them"),
    "fewer bytes than stated": (deflated(deflate(TEXT), 9), "expected 9 bytes with the CRC"),
    "second end record": (planted.bytes_of(with_zip64), "a central directory that is not right"),
    "other CRC in the local header": (
        planted.bytes_of(planted.at(14, "<I", 0)),
        "with a local header that differs",
    ),
    **{
        f"device of Windows, {name}": (planted.member(name), "a name that is a device")
        for name in ("CON", "aux.py", "a/nul.tar.gz", "COM1", "lpt9 .txt")
    },
    "sticky": (planted.member("a", 0o101644), "the mode -rw-r--r-T"),
    "socket": (planted.member("a", 0o140644), "neither a file nor a folder"),
    "file beside a folder of its name": (
        planted.member(f"{LIBRARY}/"),
        "expected either a file or a folder, found both",
    ),
    "very many folders": (planted.zipped(deep), "expected flashvar_sm80's library"),
}

RECORDS: Mapping[str, Fault] = {
    "row of a folder": (
        listed(f"{STEM}/,sha256=AAAA,9\n", f"{STEM}/"),
        "expected files alone in RECORD, found a folder",
    ),
    "padded hash": (
        planted.record(lambda rows: [rows[0].replace(",", "=,").replace("=,", ",", 1), *rows[1:]]),
        "expected sha256=",
    ),
    "kind of hash in capitals": (
        planted.record(lambda rows: [rows[0].replace("sha256", "SHA256"), *rows[1:]]),
        "expected its SHA-256 in RECORD, found 'SHA256=",
    ),
    "size with a sign": (
        planted.record(lambda rows: [",+".join(rows[0].rsplit(",", 1)), *rows[1:]]),
        "the file was changed after the wheel was made",
    ),
    "path with a dot": (
        planted.record(lambda rows: [f"./{rows[0]}", *rows[1:]]),
        "expected a row in RECORD, found none",
    ),
    "path with a backslash": (
        planted.record(lambda rows: [rows[0].replace("/", "\\"), *rows[1:]]),
        "expected a row in RECORD, found none",
    ),
    "mark of byte order": (
        planted.record(lambda rows: ["\ufeff" + rows[0], *rows[1:]]),
        r"\ufeffflashvar_sm80",
    ),
}

OF_LIBRARY: Mapping[str, Fault] = {
    "second dynamic section": (
        changed(other_dynamic, Section(".copy", 6, bytes(section(".dynamic").size), 1)),
        "expected one dynamic section, at the location of its segment",
    ),
    "other names of what is needed": (
        other_names(".dynamic", b"libc.so.6", b"evil.so.6"),
        "expected .dynamic to have .dynstr as its string table, found another section",
    ),
    "other names of symbols": (
        other_names(".dynsym", b"malloc", b"system"),
        "expected .dynsym to have .dynstr as its string table, found another section",
    ),
    "other names of versions": (
        other_names(".gnu.version_r", b"GLIBC_2.2.5", b"GLIBC_9.9.9"),
        "expected .gnu.version_r to have .dynstr as its string table, found another section",
    ),
    "hidden function": (
        planted.inside(".dynsym", "<B", 24 * 2 + 5, 2),
        "to be visible, found it hidden",
    ),
    "no hash table": (planted.library(hashed=False), "expected a GNU hash table of its symbols"),
    "hash table of fewer symbols": (
        planted.inside(".gnu.hash", "<I", 24, 3),
        "expected the exported symbols in the GNU hash table, found to differ:",
    ),
    "hash table of more symbols": (
        of_header(".gnu.hash", 32, "<Q", section(".gnu.hash").size + 4),
        "expected a hash table of the symbols that are there",
    ),
    "hash of another name": (
        planted.inside(".gnu.hash", "<I", 28, 0x123456),
        "expected the exported symbols in the GNU hash table, found to differ:",
    ),
    "filter of the hash table": (
        planted.inside(".gnu.hash", "<Q", 16, 0),
        "expected the exported symbols in the GNU hash table, found to differ:",
    ),
    "no buckets": (
        planted.inside(".gnu.hash", "<I", 0, 0),
        "expected a hash table of the symbols that are there",
    ),
    "relocation of no symbol": (
        relocations((64, 999)),
        "expected relocations of known symbols, found another",
    ),
    "relocation of code": (
        relocations((1 << 40, 0)),
        "expected relocations of writable data, found another",
    ),
    "fewer versions than symbols": (
        of_header(".gnu.version", 32, "<Q", 2),
        "expected zeros outside of sections and headers",
    ),
    "device code that is not loaded": (
        of_header(".nv_fatbin", 8, "<Q", 0),
        "expected .nv_fatbin in a loaded segment, found it in none",
    ),
    "device code without bytes": (
        of_header(".nv_fatbin", 4, "<I", 8),
        "expected the device functions of",
    ),
    "PTX with a comment": (
        planted.library(more=(Section(".x", 1, b".version 9.0 // x\n.target sm_80\n"),)),
        "expected PTX in .nv_fatbin",
    ),
    "PTX with a comment within": (
        planted.library(more=(Section(".x", 1, b".version 9.0\n.target /* x */ sm_80\n"),)),
        "expected PTX in .nv_fatbin",
    ),
    "start": (planted.number("<Q", 24, 0x1000), "entry point 0x1000"),
    "bytes in its identification": (planted.number("<B", 12, 7), "padding 00000007"),
    "room of 64 TB": (
        planted.number("<Q", 64 + 40, 1 << 46),
        "expected memory for .bss alone behind the segment",
    ),
    "indirect function": (
        planted.library(exported_kind=0x1A),
        "to be a global function, found another symbol",
    ),
    "function of a thread": (
        planted.library(exported_kind=0x16),
        "to be a global function, found another symbol",
    ),
    "weak symbol of nobody": (
        planted.library(undefined=(("malloc", "GLIBC_2.2.5"), ("evil", None))),
        "expected only undefined symbols of the C runtime, found evil",
    ),
    "path in place of a name": (
        planted.library(needed=("libc.so.6", "/tmp/evil.so")),
        "expected only the libraries of the C runtime, found /tmp/evil.so",
    ),
    "run path to torch": (
        planted.library(run_path="$ORIGIN/../torch/lib"),
        "expected no RPATH or RUNPATH, found $ORIGIN/../torch/lib",
    ),
    "empty run path": (planted.library(tags=(BIND_NOW, (15, 0))), "expected no RPATH or RUNPATH"),
    "function before all others": (
        planted.library(tags=(BIND_NOW, (32, 64), (33, 8))),
        "expected known entries in the dynamic section, found the tag 0x20",
    ),
    "versions of its own": (
        planted.library(tags=(BIND_NOW, (0x6FFFFFFC, 64))),
        "expected known entries in the dynamic section, found the tag 0x6ffffffc",
    ),
    "configuration of the loader": (
        planted.library(tags=(BIND_NOW, (0x6FFFFEFA, 1))),
        "expected known entries in the dynamic section, found the tag 0x6ffffefa",
    ),
    "second stack": (
        planted.library(segments=(*fake_elf.LOADED, Segment(elf.GNU_STACK, 6))),
        "expected a stack that is not executable",
    ),
    "core": (planted.number("<H", 16, 4), "expected a shared library, found an ELF file of type 4"),
    "name that clears the screen": (
        planted.library(soname="x\x1b[2J"),
        r"found x\x1b[2J",
    ),
    "name with a verdict": (
        planted.library(needed=("libc.so.6", "a\n  passed")),
        r"found a\n  passed",
    ),
    "1,200,000 symbols": (as_long(".dynsym", noisy(SYMBOL)), "expected at most 1,048,576 symbols"),
    "1,200,000 entries": (
        as_long(".dynamic", noisy(struct.pack("<qQ", 1, 1))),
        "expected at most 16,384 entries in the dynamic section",
    ),
    "20,000 records": (
        planted.library(
            more=(Section(".x.kernels", 1, fake_artifacts.record("a", FIRST) * 20_000),)
        ),
        "expected at most 16,384 kernel facts",
    ),
}

OF_DEVICE: Mapping[str, Fault] = {
    "flags of another architecture": (
        planted.device(
            Image("80", fake_artifacts.cubin({"_Za": 8}, 90, code="80", toolkit="13.0.88")),
            *planted.own()[1:],
        ),
        "expected a cubin for 80, as its note states, found one for 90 by its flags",
    ),
    "image of another architecture": (
        planted.device(
            *planted.own(),
            Image("90", fake_artifacts.cubin({"_Zx": 8}, 90, code="90", toolkit="13.0.88")),
        ),
        "expected machine code for sm_80 alone, found 1 images for sm_90",
    ),
    "two toolkits": (note("12.1.1", "80"), "expected one version of ptxas in a cubin, found 2"),
    "two architectures": (note("13.0.88", "90"), "expected one architecture in the note of ptxas"),
    "registers twice": (
        longer(".nv.info", REGISTERS),
        "expected one number of registers of a kernel in a cubin, found 2",
    ),
    "block twice": (longer(".nv.info._Z", BLOCK), "expected one largest block"),
    "facts cut short": (longer(".nv.info", REGISTERS[:-2]), "bytes of an attribute in .nv.info"),
    "format of the future": (
        planted.device(Image("80", fake_artifacts.cubin({"_Za": 8}, 80, 9)), *planted.own()[1:]),
        "expected a cubin of format 8 or older, found 9",
    ),
    "bytes behind the frame": (frames(behind=b"unread"), "expected one frame of zstd"),
    "second frame": (
        frames(behind=zstandard.ZstdCompressor().compress(b"unread")),
        "expected one frame of zstd",
    ),
    "frame that is skipped": (frames(behind=SKIPPED), "expected one frame of zstd"),
    "frame that is skipped, first": (frames(before=SKIPPED), "bytes of device code, found 0"),
    "entry for one architecture alone": (
        planted.fatbin(16 + 40 + 2, "<B", 0x10),
        "as its machine code states, found one for 80a",
    ),
    "kernel of nobody": (
        planted.device(
            *planted.own(),
            Image("80", fake_artifacts.cubin({"_Zx": 8}, 80, code="80", toolkit="13.0.88")),
        ),
        "expected device functions of the manifest's kernels alone, found _Zx",
    ),
    "image that the audit cannot open": (
        planted.older(compression="lz4"),
        "expected device code that is not compressed, or by zstd",
    ),
    "200,000 images": (
        planted.later(many_images, 200_000),
        "expected at most 4,096 images of device code",
    ),
    "1,100,000 facts": (
        planted.later(lambda: longer(".nv.info", FRAME * 1_100_000)),
        "expected at most 1,048,576",
    ),
}

FAULTS = rows(archive=ARCHIVE, record=RECORDS, library=OF_LIBRARY, device=OF_DEVICE)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | planted.Plant, sentence: str, tmp_path: Path) -> None:
    check_found_at_once(plant, sentence, tmp_path)


def test_a_version_of_5000_digits(auditwheel: Callable[[object], None], tmp_path: Path) -> None:
    """Of a library that auditwheel finds to be too young."""
    auditwheel(platform_tag.Policy("manylinux_2_34_x86_64", ()))
    one = planted.library(undefined=(("malloc", f"GLIBC_2.{'9' * 5000}"),))
    assert any("found manylinux_2_34_x86_64" in one for one in faults(one.write(tmp_path)))
