"""What a loader does with a library that sections do not show: parts, relocations, functions."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import fake_artifacts
import fake_elf
import planted
import pytest
from audited import Fault, check_found_at_once, faults, rows
from fake_artifacts import Wheel
from fake_elf import Section, Segment

from flashvar_factory.inspect import elf as elf_file
from flashvar_factory.inspect import fatbin

pytestmark = pytest.mark.usefixtures("auditwheel")

ROWS, ROW = 64, 56  # where the program headers begin, and the bytes of one
FLAGS, OFFSET, MEMORY, ALIGNMENT = 4, 8, 40, 48  # of a program header
LOADED, STACK = 0, 2  # parts of a fake_artifacts library
BIND_NOW = (30, 8)
WRITTEN = 3  # flags of a section
# Symbols of a fake_artifacts library: the first, the one that it asks for, and what it exports.
COUNT = 2 + len(fake_artifacts.library(planted.described()).exported)
RELATIVE, RESOLVER = 8, 37
NOTE = struct.Struct("<III4s")


def part(number: int, field: int, form: str, value: int) -> Wheel:
    """The wheel with another number in a program header."""
    return planted.number(form, ROWS + ROW * number + field, value)


def more_parts(*more: Segment) -> Wheel:
    return planted.library(segments=(*fake_elf.LOADED, *more))


def note(name: str, kind: int, text: bytes, owner: bytes = b"GNU\0") -> Wheel:
    """The wheel with a note that is loaded."""
    content = NOTE.pack(len(owner), len(text), kind, owner) + text
    return planted.library(more=(Section(name, fake_elf.NOTES, content, 0, 2),))


def relocated(*table: tuple[int, int, int], count: int | None = None) -> Wheel:
    """The wheel with relocations: what they add to which word, and their kind."""
    content = b"".join(struct.pack("<QQq", *one) for one in table)
    tags = (BIND_NOW, (7, 0), (8, len(content)), (9, 24))
    tags += () if count is None else ((0x6FFFFFF9, count),)
    parts = tuple(one._replace(flags=6) if one.kind == 1 else one for one in fake_elf.LOADED)
    table_section = Section(".rela.dyn", 4, content, 2, 2)
    return planted.library(tags=tags, more=(table_section,), segments=parts)


def packed(*words: int, more: tuple[Section, ...] = ()) -> Wheel:
    """The wheel with packed relocations (RELR)."""
    content = struct.pack(f"<{len(words)}Q", *words)
    one = relocated().library
    assert one is not None
    return planted.library(
        tags=(BIND_NOW, (36, 0), (35, len(content)), (37, 8)),
        more=(Section(".relr.dyn", 19, content, 0, 2), *more),
        segments=one.segments,
    )


def wrapped(*swapped: int) -> Wheel:
    """The wheel that registers each container, these two for one another."""
    count = len(planted.own())
    one = relocated(*[(0, RELATIVE, 0)] * count).library
    assert one is not None
    wrappers = b"\xb1\x43\x62\x46\1\0\0\0".ljust(24, b"\0") * count
    made = planted.Built(
        **{**vars(one), "more": (*one.more, Section(".nvFatBinSegment", 1, wrappers, 0, WRITTEN))}
    )

    def change(data: bytearray) -> None:
        file = elf_file.parse(bytes(data), "library")
        code, table, words = (
            file.named(name)[0] for name in (".nv_fatbin", ".rela.dyn", ".nvFatBinSegment")
        )
        places = fatbin.places(code.content, "library")
        for first, second in zip(swapped[::2], swapped[1::2], strict=True):
            places[first], places[second] = places[second], places[first]
        for i, place in enumerate(places):
            row = words.address + 24 * i + 8, RELATIVE, code.address + place
            struct.pack_into("<QQq", data, table.offset + 24 * i, *row)

    object.__setattr__(made, "change", change)
    return Wheel(planted.described(), made)


def older(*reached: int, end: int = 0) -> Wheel:
    """The wheel with a hash table of the older kind, of one bucket, that leads to these symbols."""
    chains = [0] * COUNT
    for number, following in zip(reached, (*reached[1:], end), strict=True):
        chains[number] = following
    content = struct.pack(f"<{3 + COUNT}I", 1, COUNT, reached[0], *chains)
    return planted.library(tags=(BIND_NOW, (4, 0)), more=(Section(".hash", 5, content, 2, 2),))


def symbol(row: int, offset: int, form: str, value: int) -> Wheel:
    """The wheel with another number in a row of the table of symbols."""
    return planted.inside(".dynsym", form, fake_elf.SYMBOL.size * row + offset, value)


def behind_the_end(data: bytearray) -> None:
    """A run path behind the last entry of the dynamic section."""
    (found,) = elf_file.parse(bytes(data), "library").named(".dynamic")
    struct.pack_into("<q", data, found.offset + found.size - 16, 0)
    struct.pack_into("<Q", data, found.offset + found.size - 8, 7)


def zeroed(data: bytearray) -> None:
    """A section of zeros that is longer than its part."""
    file = elf_file.parse(bytes(data), "library")
    (start,) = struct.unpack_from("<Q", data, 40)
    number = [one.name for one in file.sections].index(".bss")
    struct.pack_into("<Q", data, start + 64 * number + 32, 1 << 20)


def with_bss() -> Wheel:
    one = planted.Built(
        **{
            **vars(fake_artifacts.library(planted.described())),
            "more": (Section(".bss", 8, b"", 0, 3),),
        }
    )
    object.__setattr__(one, "change", zeroed)
    return Wheel(planted.described(), one)


def with_words(words: bytes) -> Wheel:
    """The wheel whose first entry has words behind its header."""
    whole = bytearray(fake_artifacts.library(planted.described()).fatbin)
    (size,) = struct.unpack_from("<Q", whole, 8)
    struct.pack_into("<Q", whole, 8, size + len(words))
    struct.pack_into("<I", whole, 16 + 4, 64 + len(words))
    whole[16 + 64 : 16 + 64] = words
    return planted.library(fatbin=bytes(whole))


PARTS: dict[str, Fault] = {
    "that nobody reads": (part(LOADED, FLAGS, "<I", 0), "found the flags 0x0"),
    "with unknown flags": (part(LOADED, FLAGS, "<I", 0x15), "found the flags 0x15"),
    "aligned to nothing": (part(LOADED, ALIGNMENT, "<Q", 0), "to a power of two from 4096"),
    "aligned to three pages": (part(LOADED, ALIGNMENT, "<Q", 12288), "to a power of two"),
    "aligned to 4 EB": (part(LOADED, ALIGNMENT, "<Q", 1 << 62), "to a power of two from 4096"),
    "too short for its zeros": (with_bss(), "expected .bss in a part that is loaded"),
    "dynamic section that is longer in memory": (
        part(1, MEMORY, "<Q", 1 << 40),
        "expected the dynamic section as long in memory as in the file",
    ),
    "stack of 1 TB": (part(STACK, MEMORY, "<Q", 1 << 40), "expected a stack of the usual size"),
    "notes elsewhere": (
        more_parts(Segment(4, 4, ".rodata")),
        "expected segment 0x4 at the location of a section of notes",
    ),
    "exceptions elsewhere": (
        more_parts(Segment(0x6474E550, 4, ".rodata")),
        "expected segment 0x6474e550 at the location of .eh_frame_hdr",
    ),
    "properties elsewhere": (
        more_parts(Segment(0x6474E553, 4, ".rodata")),
        "at the location of .note.gnu.property",
    ),
    "threads without variables": (
        more_parts(Segment(7, 4, ".rodata")),
        "expected a segment of threads' variables, found 1",
    ),
    "variables without a part": (
        planted.library(more=(Section(".tdata", 1, b"x" * 8, 0, 0x403),)),
        "expected a segment of threads' variables, found 0",
    ),
    "protected elsewhere": (
        part(3, OFFSET, "<Q", 0),
        "expected PT_GNU_RELRO within a part that is loaded",
    ),
    "data that is protected": (
        planted.library(
            more=(Section(".data", 1, bytes(3 * fake_elf.PAGE), 0, WRITTEN),),
            segments=planted.segments(0x6474E552, section=".data"),
        ),
        "expected .data outside of PT_GNU_RELRO, found it within",
    ),
    "addresses that stay writable": (
        planted.library(more=(Section(".got", 1, bytes(8), 0, WRITTEN),)),
        "expected .got within PT_GNU_RELRO, found it outside",
    ),
    "note of a newer system": (
        note(".note.ABI-tag", 1, struct.pack("<4I", 0, 99, 0, 0)),
        "expected a build's hash or properties in .note.ABI-tag, found kind 1",
    ),
    "note of somebody": (note(".note.x", 3, bytes(20), b"evil"), "expected notes of GNU"),
    "note cut short": (
        planted.library(more=(Section(".note.x", 7, NOTE.pack(4, 99, 3, b"GNU\0"), 0, 2),)),
        "expected a build's hash or properties in .note.x",
    ),
    "headers elsewhere": (
        more_parts(Segment(6, 4, ".rodata")),
        "expected segment 0x6 at the location of the program headers",
    ),
    "steps elsewhere": (
        more_parts(Segment(0x6474E554, 4, ".rodata")),
        "expected segment 0x6474e554 at the location of .sframe",
    ),
    "section that is not loaded": (
        planted.library(more=(Section(".evil", 1, b"unread"),)),
        "expected names and short notes alone in sections that are not loaded, found 6 bytes",
    ),
    "long comment": (
        planted.library(more=(Section(".comment", 1, bytes(70_000)),)),
        "alone in sections that are not loaded, found 70,000 bytes in .comment",
    ),
    "hash of 1 MB": (
        note(".note.gnu.build-id", 3, b"x" * 1_000_000),
        "expected a hash of 8 to 64 bytes in .note.gnu.build-id, found 1,000,000 bytes",
    ),
    "no hash": (
        note(".note.gnu.build-id", 3, b""),
        "expected a hash of 8 to 64 bytes in .note.gnu.build-id, found 0 bytes",
    ),
    "instructions of newer processors": (
        note(".note.gnu.property", 5, struct.pack("<4I", 0xC0008002, 4, 8, 0)),
        "that every processor of the platform has, found 0xc0008002",
    ),
}

WORDS: dict[str, Fault] = {
    "that run code": (relocated((64, RESOLVER, 0)), "expected relocations of known kinds"),
    "of another processor": (relocated((64, 1027, 0)), "expected relocations of known kinds"),
    "twice": (
        relocated((64, RELATIVE, 64), (64, RELATIVE, 64)),
        "expected each word to be relocated once",
    ),
    "outside": (
        relocated((64, RELATIVE, 1 << 40)),
        "expected relocations of addresses of the library",
    ),
    "more relative ones than there are": (
        relocated((64, RELATIVE, 64), count=2),
        "expected DT_RELACOUNT to be 1",
    ),
    "packed, of code": (packed(0), "expected relocations of addresses of the library"),
    "packed, outside": (packed(1 << 40), "expected relocations of writable data, found another"),
    "packed, of no word": (packed(0xFFFF), "expected relocations of addresses of the library"),
    "packed, twice": (
        packed(24, 24),
        "expected each word to be relocated once, found two for 0x18",
    ),
    "cut short": (
        planted.library(
            tags=(BIND_NOW, (7, 0), (8, 25), (9, 24)),
            more=(Section(".rela.dyn", 4, bytes(25), 2, 2),),
        ),
        "expected whole relocations in .rela.dyn",
    ),
    "function of the start that is none": (
        planted.library(
            tags=(BIND_NOW, (25, 0), (27, 8)),
            more=(Section(".init_array", 14, bytes(8), 0, WRITTEN),),
        ),
        "expected functions of .text in .init_array, found nothing",
    ),
    "device code that nobody registers": (
        planted.library(more=(Section(".nvFatBinSegment", 1, b"", 0, WRITTEN),)),
        "expected one wrapper in .nvFatBinSegment for each of",
    ),
    "device code without wrappers": (
        relocated((24, RELATIVE, 0)),
        "expected one wrapper in .nvFatBinSegment for each of",
    ),
    "device code of another object file": (
        wrapped(0, 1),
        "expected wrappers in .nvFatBinSegment in the order of their containers",
    ),
    "wrapper that is none": (
        planted.library(more=(Section(".nvFatBinSegment", 1, bytes(24), 0, WRITTEN),)),
        "expected the wrapper of a container at 0",
    ),
}

NAMES: dict[str, Fault] = {
    "hash of a version": (planted.inside(".gnu.version_r", "<I", 16, 7), "expected the hash of GL"),
    "form of the versions": (
        planted.inside(".gnu.version_r", "<H", 0, 2),
        "expected whole entries, found one cut short",
    ),
    "first symbol": (symbol(0, 8, "<Q", 1), "expected symbol 0 to be a name that is asked for"),
    "symbol without a name": (symbol(1, 0, "<I", 0), "expected symbol 1 to be a name"),
    "symbol of the library alone": (symbol(1, 4, "<B", 2), "expected symbol 1 to be a name"),
    "asked for, and at a place": (symbol(1, 8, "<Q", 64), "expected symbol 1 to be a name"),
    "calling convention": (symbol(2, 5, "<B", 0x80), "expected symbol 2 to be a name"),
    "asked for, and hidden": (symbol(1, 5, "<B", 2), "expected symbol 1 to be a name"),
    "that glibc has not": (
        planted.library(undefined=(("mallok", "GLIBC_2.2.5"),)),
        "expected mallok of GLIBC_2.2.5 in the libraries that it needs (libc.so.6), found no such",
    ),
    "that glibc has in another version": (
        planted.library(undefined=(("getrandom", "GLIBC_2.2.5"),)),
        "expected getrandom of GLIBC_2.2.5 in the libraries",
    ),
    "of a library that is not needed": (
        planted.library(undefined=(("malloc", "GLIBC_2.2.5"), ("expf", "GLIBC_2.27"))),
        "found it in libm.so.6, which the library does not need",
    ),
    "symbol behind a section's start": (
        planted.library(starts=((8, 4),)),
        "expected symbol 1 to be a name",
    ),
    "symbol of no section": (planted.library(starts=((63, 0),)), "expected symbol 1 to be a name"),
    "behind the end": (planted.built(behind_the_end), "expected zeros after the last entry"),
    "addresses elsewhere": (
        planted.library(tags=(BIND_NOW, (3, 64))),
        "expected dynamic entry 0x3 at .got",
    ),
    "in no older hash table": (
        older(*range(2, COUNT)),
        "expected the exported symbols in the older hash table, found to differ: malloc",
    ),
    "endless in an older hash table": (
        older(1, 2, end=1),
        "expected a hash table of the symbols that",
    ),
    "older hash table cut short": (
        planted.library(tags=(BIND_NOW, (4, 0)), more=(Section(".hash", 5, bytes(4), 2, 2),)),
        "expected a hash table of the symbols that",
    ),
    "loader of another processor": (
        planted.library(needed=("libc.so.6", "ld-linux-aarch64.so.1")),
        "expected only the libraries of the C runtime, found ld-linux-aarch64.so.1",
    ),
    "exceptions of nobody": (
        planted.library(more=(Section(".eh_frame_hdr", 1, b"x" * 20, 0, 2),)),
        "expected .eh_frame_hdr to list the functions",
    ),
}

ENTRIES: dict[str, Fault] = {
    "for Windows": (planted.fatbin(16 + 40, "<I", 0x8041), "for 64 bits and Linux"),
    "with debug information": (planted.fatbin(16 + 40, "<I", 0x8013), "and no unknown ones"),
    "with data in its header": (with_words(bytes(2048)), "expected a name and options alone"),
    "with PTX in its header": (
        with_words(b".version 9.0 .target sm_80 ".ljust(64, b"\0")),
        "expected a name and options alone",
    ),
}


def of_code(*more: Section, info: bytes = b"", name: str = ".nv.info") -> Wheel:
    """The wheel whose first image has other sections, or more, or more attributes in one."""
    whole = elf_file.parse(fake_artifacts.device_code(FIRST, "80"), "cubin")
    parts = [
        Section(one.name, one.kind, bytes(one.content), one.link, one.flags, one.info)
        for one in whole.sections[1:-1]
    ]
    parts = [one._replace(content=one.content + info) if one.name == name else one for one in parts]
    others = {one.name: one for one in more}
    parts = [others.pop(one.name, one) for one in parts]
    content = fake_elf.elf(fake_elf.CUDA, [*parts, *others.values()], whole.flags, 8)
    return planted.device(fake_artifacts.Image("80", content), *planted.own()[1:])


def code_with_name() -> Wheel:
    """The wheel whose first image has its code in a section of another name."""
    content = fake_artifacts.device_code(FIRST, "80").replace(b".text._Z", b".tixt._Z")
    return planted.device(fake_artifacts.Image("80", content), *planted.own()[1:])


FIRST = planted.described().kernels[0]
NAME = FIRST.functions[0]
FRAME = struct.pack("<BBHII", 4, 0x11, 8, 1, 64)
STACK_OF_NONE = struct.pack("<BBHII", 4, 0x12, 8, 1, 0)
BLOCK = struct.pack("<BBHIII", 4, 0x10, 12, 64, 1, 1)

CODE: dict[str, Fault] = {
    "stack smaller than its functions have": (
        of_code(info=FRAME + STACK_OF_NONE),
        "expected a stack of 64 bytes or more in a cubin",
    ),
    "block of another size": (
        of_code(info=BLOCK, name=f".nv.info.{NAME}"),
        "in a cubin, found 2 that differ",
    ),
    "block of nobody": (
        planted.device(planted.first(threads=0), *planted.own()[1:]),
        "expected at least 128 threads in a block of each function",
    ),
    "attribute of an unknown format": (
        of_code(info=struct.pack("<BBH", 9, 0x05, 0)),
        "expected attributes of known formats in .nv.info, found 9",
    ),
    "parameters of two sizes": (
        of_code(
            Section(f".nv.constant0.{NAME}", 1, bytes(0x200)),
            info=struct.pack("<BBHIIBBH", 4, 0x0A, 8, 0, 64 << 16 | 0x160, 3, 0x19, 32),
            name=f".nv.info.{NAME}",
        ),
        "expected one number of bytes of",
    ),
    "kernel that is a part of its code": (
        of_code(Section(f".text.{NAME}", 1, bytes(2000))),
        "to be all of .text",
    ),
    "kernel whose code has another name": (
        code_with_name(),
        "to be all of .text",
    ),
    "100 KB of its own": (
        of_code(Section(f".nv.shared.{NAME}", 1, bytes(100_000))),
        "expected at most 49,152 bytes in .nv.shared",
    ),
}


def code_with(offset: int, form: str, number: int) -> Wheel:
    """The wheel whose first image has another number in its header."""
    content = bytearray(fake_artifacts.device_code(FIRST, "80"))
    struct.pack_into(form, content, offset, number)
    return planted.device(fake_artifacts.Image("80", bytes(content)), *planted.own()[1:])


def text(
    flags: int = 6, info: int = fake_artifacts.REGISTERS << 24 | 1, name: str = NAME
) -> Section:
    """The code of the first kernel, its symbol's number and its registers."""
    return Section(f".text.{name}", 1, bytes(1000), 0, flags, info)


# Its symbol in the table of strings.
ELSEWHERE = bytes(24) + fake_elf.SYMBOL.pack(1, 0x12, fake_elf.KERNEL, 1, 0, 1000)
ONE_PARAMETER = struct.pack("<BBHIHHIBBH", 4, 0x17, 12, 0, 0, 0, 48 << 18, 3, 0x19, 32)
# Each is refused as code that ptxas did not write, and names what differs.
FORMS: dict[str, Fault] = {
    "object file": (code_with(16, "<H", 1), "a header of type 1"),
    "another system's": (code_with(7, "<B", 3), "OS ABI 0x3"),
    "version of ELF": (code_with(20, "<I", 7), "version 0x7"),
    "entry point": (code_with(24, "<Q", 64), "entry point 0x40"),
    "flags": (code_with(48, "<I", 0x86005004), "the flags 0x86005004 instead of 0x6005004"),
    "kernel in another section": (
        of_code(Section(".symtab", 2, ELSEWHERE, 1)),
        f"{NAME} elsewhere than in .text.{NAME}",
    ),
    "kernel of another number": (
        of_code(text(info=fake_artifacts.REGISTERS << 24 | 2)),
        "other registers in sh_info",
    ),
    "fewer registers": (of_code(text(info=16 << 24 | 1)), "other registers in sh_info"),
    "code that is not executed": (of_code(text(flags=2, name="x")), "is not code by its flags"),
    "lines of the sources": (
        of_code(Section(".debug_line", 1, b"x")),
        "debug information, .debug_line",
    ),
    "parameters behind the end": (
        of_code(info=ONE_PARAMETER, name=f".nv.info.{NAME}"),
        "parameters up to byte 48 of 32",
    ),
}

FAULTS = rows(forms=FORMS, code=CODE, parts=PARTS, words=WORDS, names=NAMES, entries=ENTRIES)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | Callable[[Path], Path], sentence: str, tmp_path: Path) -> None:
    check_found_at_once(plant, sentence, tmp_path)


def test_symbols_of_sections_are_no_fault(tmp_path: Path) -> None:
    # As linkers for aarch64 write them.
    wheel = planted.library(starts=((8, 0), (9, 0))).write(tmp_path)
    assert faults(wheel, planted.expected()) == []


def test_an_older_hash_table_beside_the_other_is_no_fault(tmp_path: Path) -> None:
    # As linkers write both where nothing is said.
    wheel = older(*range(1, COUNT)).write(tmp_path)
    assert faults(wheel, planted.expected()) == []


def test_device_code_that_is_registered_is_no_fault(tmp_path: Path) -> None:
    found = faults(wrapped().write(tmp_path), planted.expected())
    assert not [one for one in found if one.startswith("relocations")]


def test_symbols_of_two_libraries_are_found_in_either(tmp_path: Path) -> None:
    # libc and libpthread have it; libpthread is not needed.
    undefined = (("malloc", "GLIBC_2.2.5"), ("write", "GLIBC_2.2.5"))
    wheel = planted.library(undefined=undefined).write(tmp_path)
    assert faults(wheel, planted.expected()) == []
