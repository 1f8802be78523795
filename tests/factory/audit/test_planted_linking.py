"""What a linker leaves in a library: relocations, wrappers, frames, the flags of sections."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import fake_artifacts
import fake_elf
import planted
import pytest
from audited import Fault, check_found_at_once, faults, rows
from fake_artifacts import Wheel
from fake_elf import Section, Segment

from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import elf as elf_file
from flashvar_factory.inspect import unwinding

pytestmark = pytest.mark.usefixtures("auditwheel")

BIND_NOW = (30, 8)
WRITTEN, LOADED, CODE = 3, 2, 6  # flags of sections
ADDRESS, DATA, SLOT, RELATIVE, MODULE, OFFSET = 1, 6, 7, 8, 16, 18  # kinds of relocations
ASKED, SHOWN = (
    1,
    2,
)  # symbols of a fake_artifacts library: that it asks for, the first that it shows
WRITABLE = tuple(one._replace(flags=6) if one.kind == 1 else one for one in fake_elf.LOADED)
WRITTEN_PART = (*fake_elf.LOADED[:1], Segment(1, 6, ".data"), *fake_elf.LOADED[1:])
CODE_BYTES = 6  # of a fake_artifacts function
# The common part of frames without and with handlers, as compilers write them; instructions aside.
PLAIN = b"\x01zR\0\x01\x78\x10\x01\x1b" + bytes(3)
HANDLED = b"\x01zPLR\0\x01\x78\x10\x07\x9b" + bytes(4) + b"\x1b\x1b" + bytes(1)
HANDLERS = b"\xff\xff\x01\x00"
SECTION, ROW = 64, 56  # bytes of the header of a section, and of a part
FLAGS = 4  # of a part's header


def changed(change: Callable[[bytearray, elf_file.Elf], object], **more: object) -> Wheel:
    """The wheel whose library has these changes, and is then changed in its bytes."""
    made = planted.Built(**{**vars(fake_artifacts.library(planted.described())), **more})
    object.__setattr__(
        made, "change", lambda data: change(data, elf_file.parse(bytes(data), "library"))
    )
    return Wheel(planted.described(), made)


def related(*rows: tuple[int, int, int]) -> Wheel:
    """The wheel with relocations of words of .data: kind, symbol, what is added."""

    def change(data: bytearray, file: elf_file.Elf) -> None:
        (table,), (words,) = file.named(".rela.dyn"), file.named(".data")
        for number, (kind, symbol, added) in enumerate(rows):
            at = table.offset + 24 * number
            struct.pack_into("<QIIq", data, at, words.address + 8 * number, kind, symbol, added)

    size = 24 * len(rows)
    sections = (
        Section(".rela.dyn", 4, bytes(size), 2, LOADED),
        Section(".data", 1, bytes(8 * len(rows)), 0, WRITTEN),
    )
    tags = (BIND_NOW, (7, 0), (8, size), (9, 24))
    return changed(change, tags=tags, more=sections, segments=WRITABLE)


def started(*behind: int) -> Wheel:
    """The wheel that calls what is so far behind the beginning of its code as it is opened."""

    def change(data: bytearray, file: elf_file.Elf) -> None:
        framed(data, file)
        (table,), (words,), (code,) = map(file.named, (".rela.dyn", ".init_array", ".text"))
        for number, place in enumerate(behind):
            row = words.address + 8 * number, RELATIVE, code.address + place
            struct.pack_into("<QQq", data, table.offset + 24 * number, *row)

    size = 24 * len(behind)
    tags = (BIND_NOW, (7, 0), (8, size), (9, 24), (25, 0), (27, 8 * len(behind)))
    sections = (
        Section(".rela.dyn", 4, bytes(size), 2, LOADED),
        Section(".init_array", 14, bytes(8 * len(behind)), 0, WRITTEN),
        *frame_sections(),
    )
    return changed(change, tags=tags, more=sections, segments=WRITABLE)


def wrapped(change: Callable[[bytearray, elf_file.Section], object]) -> Wheel:
    """The wheel with the wrapper of a container, changed."""
    wrapper = Section(".nvFatBinSegment", 1, b"\xb1\x43\x62\x46\1\0\0\0".ljust(24, b"\0"), 0, 3)
    return changed(
        lambda data, file: change(data, file.named(".nvFatBinSegment")[0]), more=(wrapper,)
    )


def frame_sections(common: bytes = HANDLED) -> tuple[Section, ...]:
    """Sections of the size of what `framed` writes: two functions, of which one has handlers."""
    frames = 4 + 4 + len(PLAIN) + 20 + 4 + 4 + len(common) + 24 + 4
    return (
        Section(".eh_frame", 1, bytes(frames), 0, LOADED),
        Section(".eh_frame_hdr", 1, bytes(12 + 16), 0, LOADED),
        Section(".gcc_except_table", 1, HANDLERS, 0, LOADED),
    )


def framed(
    data: bytearray, file: elf_file.Elf, common: bytes = HANDLED, size: int = CODE_BYTES
) -> tuple[elf_file.Section, int]:
    """Writes the frames of the first two functions; .eh_frame, and where the second frame is."""
    frames, table, handlers, code = (
        file.named(name)[0] for name in (".eh_frame", ".eh_frame_hdr", ".gcc_except_table", ".text")
    )
    content, places = b"", []
    for number, (form, pointer) in enumerate(((PLAIN, 0), (common, 4))):
        start = len(content)
        content += struct.pack("<II", 4 + len(form), 0) + form
        place = len(content)
        places.append(place)
        begins = code.address + CODE_BYTES * number - (frames.address + place + 8)
        content += struct.pack("<IIiI", 16 + pointer, place + 4 - start, begins, size)
        if pointer:
            at = frames.address + place + 17
            content += b"\x04" + struct.pack("<i", handlers.address - at) + bytes(3)
        else:
            content += bytes(4)
    data[frames.offset : frames.offset + len(content)] = content
    header = struct.pack("<4BiI", 1, 0x1B, 0x03, 0x3B, frames.address - table.address - 4, 2)
    for number, place in enumerate(places):
        beginning = code.address + CODE_BYTES * number - table.address
        header += struct.pack("<ii", beginning, frames.address + place - table.address)
    data[table.offset : table.offset + len(header)] = header
    return frames, places[1]


def unwound(
    change: Callable[[bytearray, elf_file.Elf, int], object] = lambda *_: None,
    common: bytes = HANDLED,
    size: int = CODE_BYTES,
) -> Wheel:
    """The wheel with frames; `change` is given where the second one is in the file."""

    def plant(data: bytearray, file: elf_file.Elf) -> None:
        frames, place = framed(data, file, common, size)
        change(data, file, frames.offset + place)

    return changed(plant, more=frame_sections(common))


def at_second(behind: int, form: str, value: int) -> Wheel:
    return unwound(lambda data, _, place: struct.pack_into(form, data, place + behind, value))


def in_section(name: str, behind: int, value: int) -> Wheel:
    """The wheel with frames, and with another word in a section."""
    return unwound(
        lambda data, file, _: struct.pack_into(
            "<I", data, file.named(name)[0].offset + behind, value
        )
    )


def of_section(name: str, field: int, form: str, value: int, *more: Section) -> Wheel:
    """The wheel with another number in the header of a section."""

    def change(data: bytearray, file: elf_file.Elf) -> None:
        (start,) = struct.unpack_from("<Q", data, 40)
        number = [one.name for one in file.sections].index(name)
        struct.pack_into(form, data, start + SECTION * number + field, value)

    parts = WRITTEN_PART if more else fake_elf.LOADED
    return changed(change, more=more, segments=parts)


def part(number: int, value: int) -> Wheel:
    """The wheel whose part is accessed otherwise."""
    return planted.number("<I", 64 + ROW * number + FLAGS, value)


RELATIONS: Mapping[str, Fault] = {
    "call of no symbol": (related((SLOT, 0, 0)), "expected a relocation of a named function at"),
    "call behind a function": (
        related((SLOT, ASKED, 16)),
        "found one of symbol 1 (malloc) and 16 bytes",
    ),
    "function called by two slots": (
        related((SLOT, ASKED, 0), (SLOT, ASKED, 0)),
        "expected one slot for calls of malloc, found 2",
    ),
    "address of no symbol": (related((ADDRESS, 0, 64)), "expected a relocation of a name at"),
    "data of no symbol": (related((DATA, 0, 64)), "expected a relocation of a name at"),
    "address behind a symbol": (related((ADDRESS, ASKED, 1 << 30)), "(malloc) and 1073741824"),
    "variable of threads that is a function": (
        related((OFFSET, ASKED, 0)),
        "expected a relocation of a variable of threads at",
    ),
    "variable of threads behind all": (
        related((OFFSET, 0, 1 << 40)),
        "expected a relocation of a variable of threads at",
    ),
    "start within a function": (
        started(0, CODE_BYTES + 3),
        "expected the address of a function's beginning at",
    ),
    "start twice": (started(0, 0), "expected each function once in .init_array, found"),
    "wrapper of more containers": (
        wrapped(lambda data, words: struct.pack_into("<Q", data, words.offset + 16, 1234)),
        "expected the wrapper of a container at 0",
    ),
}

SYMBOLS: Mapping[str, Fault] = {
    "weak function of the C runtime": (
        planted.inside(".dynsym", "<B", fake_elf.SYMBOL.size * ASKED + 4, 0x22),
        "found weak ones: malloc; declare them without __attribute__((weak))",
    ),
    "version that may be missing": (
        planted.inside(".gnu.version_r", "<H", 16 + 4, 2),
        "expected GLIBC_2.2.5 to be needed, found flags 0x2",
    ),
    "one function of two names": (
        changed(
            lambda data, file: struct.pack_into(
                "<Q",
                data,
                file.named(".dynsym")[0].offset + fake_elf.SYMBOL.size * SHOWN + 8,
                file.named(".text")[0].address + CODE_BYTES,
            )
        ),
        "expected a function for each name, found one at",
    ),
    "symbols of its own": (
        of_section(".dynsym", 44, "<I", 3),
        "expected .dynsym to state 1 symbols of its own, found 3",
    ),
}

FRAMES: Mapping[str, Fault] = {
    "frame of endless size": (at_second(0, "<I", 0x7FFFFFF0), "found it damaged"),
    "frame of another common part": (at_second(4, "<I", 7), "found it damaged"),
    "function longer than the code": (at_second(12, "<I", 1 << 20), "found it damaged"),
    "functions that overlap": (unwound(size=CODE_BYTES + 1), "found it damaged"),
    "common part of another version": (
        unwound(common=b"\3" + HANDLED[1:]),
        "found it damaged; link the library again",
    ),
    "common part of unknown letters": (
        unwound(common=HANDLED.replace(b"zPLR", b"zPXR")),
        "found it damaged",
    ),
    "common part with addresses of 8 bytes": (
        unwound(common=HANDLED.replace(b"\x1b\x1b", b"\x1b\x00")),
        "found it damaged",
    ),
    "handlers outside of their section": (at_second(17, "<i", 1), "found it damaged"),
    "handlers that are none": (
        in_section(".gcc_except_table", 0, 0),
        "expected a table of handlers in .gcc_except_table at",
    ),
    "data behind the end": (in_section(".eh_frame", 12, 0), "found it damaged"),
    "common part without its addresses": (unwound(common=HANDLED[:9]), "found it damaged"),
}

DATA_SECTION = Section(".data", 1, bytes(8), 0, WRITTEN)
ACCESS: Mapping[str, Fault] = {
    "code that its section says is written": (
        of_section(".text", 8, "<Q", 7),
        "expected flags of .text as its part has them (0x5), found 0x7",
    ),
    "data that its section says is code": (
        of_section(".data", 8, "<Q", 7, DATA_SECTION),
        "expected flags of .data as its part has them",
    ),
    "data that is compressed": (
        of_section(".rodata", 8, "<Q", 0x802),
        "expected flags of .rodata as its part has them (0x5), found 0x802",
    ),
    "code of an unknown kind": (
        of_section(".text", 4, "<I", 0x7000ABCD),
        "expected .text to be of a kind that is loaded, found 0x7000abcd",
    ),
    "constants as a table of texts": (
        of_section(".rodata", 4, "<I", 3),
        "expected .rodata to be of a kind that is loaded, found 0x3",
    ),
    "code aligned to 3 bytes": (
        of_section(".text", 48, "<Q", 3),
        "expected .text to be aligned to a power of two, found 3",
    ),
    "code beside its alignment": (
        of_section(".text", 48, "<Q", 1 << 20),
        "expected .text to be aligned to a power of two, found 1048576",
    ),
    "dynamic section that is code": (part(1, 7), "expected a segment 0x2 that is read alone"),
    "stack that nobody reads": (part(2, 0), "expected a segment 0x6474e551 that is read alone"),
    "protected part that is code": (part(3, 7), "expected a segment 0x6474e552 that is read alone"),
}

FAULTS = rows(relations=RELATIONS, symbols=SYMBOLS, frames=FRAMES, access=ACCESS)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | Callable[[Path], Path], sentence: str, tmp_path: Path) -> None:
    check_found_at_once(plant, sentence, tmp_path)


@pytest.mark.parametrize("name", [".eh_frame", ".eh_frame_hdr", ".gcc_except_table"])
def test_frames_with_any_byte_changed_are_read_or_refused(name: str) -> None:
    data = bytearray(unwound().files()["flashvar_sm80/libflashvar_sm80.so"])
    section = elf_file.parse(bytes(data), "library").named(name)[0]
    refused = 0
    for position in range(section.offset, section.offset + section.size):
        before = data[position]
        for value in range(256):
            data[position] = value
            try:
                unwinding.functions(elf_file.parse(bytes(data), "library"))
            except BuildError:
                refused += 1
        data[position] = before
    assert refused >= section.size


def test_frames_are_no_fault(tmp_path: Path) -> None:
    assert faults(unwound().write(tmp_path), planted.expected()) == []


@pytest.mark.parametrize(
    "row", [(SLOT, ASKED, 0), (DATA, ASKED, 0), (ADDRESS, ASKED, 0), (MODULE, 0, 0)]
)
def test_relocations_by_symbols_are_no_fault(row: tuple[int, int, int], tmp_path: Path) -> None:
    found = faults(related(row).write(tmp_path), planted.expected())
    assert not [one for one in found if one.startswith("relocations")]
