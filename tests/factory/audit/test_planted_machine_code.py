"""Faults within machine code and PTX that a driver reads, and no table of a wheel shows."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_artifacts
import fake_elf
import planted
import pytest
from audited import Fault, check_found_at_once, faults, rows
from fake_artifacts import Image, Wheel
from fake_elf import Section
from planted import described

from flashvar.binaries.manifest import Launch
from flashvar_factory.errors import BuildError
from flashvar_factory.inspect import cubin, elf

pytestmark = pytest.mark.usefixtures("auditwheel")

FIRST = described().kernels[0]
(NAME,) = FIRST.functions
INFO, CODE, CONSTANTS = f".nv.info.{NAME}", f".text.{NAME}", f".nv.constant0.{NAME}"
SYMBOL, KERNEL = fake_elf.SYMBOL.size, 1  # bytes of a symbol, the number of the kernel's
KIND, ADDRESS, ALIGNMENT = 4, 16, 48  # places in the header of a section
WHOLE = planted.own()[0]


def sized(kind: int, *words: int) -> bytes:
    """An attribute of words."""
    return struct.pack(f"<BBH{len(words)}I", 4, kind, 4 * len(words), *words)


def with_sections(*more: Section, parts: tuple[tuple[int, ...], ...] = ()) -> Image:
    """The first image with more sections, and with parts: kind, flags, offset, bytes, in memory."""
    whole = elf.parse(WHOLE.content, "cubin")
    held = {
        one.name: Section(one.name, one.kind, bytes(one.content), one.link, one.flags, one.info)
        for one in whole.sections[1:-1]
    }
    for one in more:
        before = held.get(one.name)
        content = (before.content if before else b"") + one.content
        held[one.name] = (before or one)._replace(content=content)
    segments = [fake_elf.Segment(1, 5) for _ in parts]
    content = bytearray(fake_elf.elf(fake_elf.CUDA, list(held.values()), whole.flags, 8, segments))
    for number, (kind, flags, offset, size, memory) in enumerate(parts):
        row = kind, flags, offset, 0, 0, size, memory, 8
        struct.pack_into("<2I6Q", content, 64 + 56 * number, *row)
    return replace(WHOLE, content=bytes(content))


def of_info(*attributes: bytes) -> Wheel:
    """The wheel whose first kernel has more attributes."""
    section = Section(INFO, 0x70000000, b"".join(attributes), 2)
    return planted.device(with_sections(section), *planted.own()[1:])


def of_header(name: str, field: int, form: str, value: int) -> Wheel:
    """The wheel whose first image has another number in the header of a section."""

    def change(content: bytearray, file: elf.Elf) -> None:
        (start,) = struct.unpack_from("<Q", content, 40)
        number = file.numbers[name][0]
        struct.pack_into(form, content, start + 64 * number + field, value)

    return patched(change)


def patched(change: Callable[[bytearray, elf.Elf], object]) -> Wheel:
    """The wheel whose first image has other bytes."""
    content = bytearray(WHOLE.content)
    change(content, elf.parse(WHOLE.content, "cubin"))
    return planted.device(replace(WHOLE, content=bytes(content)), *planted.own()[1:])


def asking(name: bytes) -> Wheel:
    """The wheel whose first image asks for a symbol; it is not a kernel's, and is called so."""

    def change(content: bytearray, file: elf.Elf) -> None:
        (table,), (strings,) = file.named(".symtab"), file.named(".strtab")
        at = table.offset + SYMBOL * (KERNEL + 1)
        place = strings.size - len(name) - 1
        struct.pack_into("<IBBHQQ", content, at, place, 0x12, 0, 0, 0, 0)
        start = strings.offset + place
        content[start : start + len(name)] = name

    return patched(change)


def part(kind: int, flags: int, offset: int, size: int, memory: int) -> Wheel:
    image = with_sections(parts=((kind, flags, offset, size, memory),))
    return planted.device(image, *planted.own()[1:])


def launched(shared_memory: int, own: int) -> Wheel:
    """The wheel whose first kernel has memory of its own beside what its launch asks for."""
    launch = Launch("fwd_kernel", "mma.sync", "every call", FIRST.tile, 128, shared_memory)
    row = replace(FIRST, shared_memory=shared_memory, launches=(launch,))
    one = replace(described(), kernels=(row, *described().kernels[1:]))
    image = with_sections(Section(f".nv.shared.{NAME}", 0x7000000A, bytes(own), 0, 3))
    return Wheel(one, fake_artifacts.library(one, image, *planted.own()[1:]))


def text(change: Callable[[str], str] = str, threads: int = 128) -> str:
    """PTX of all kernels."""
    kernels = "".join(
        f".visible .entry {name}(\n.param .b64 a\n)\n.maxntid {threads}, 1, 1\n{{\nret;\n}}\n"
        for row in described().kernels
        for name in row.functions
    )
    return change(f".version 9.0\n.target sm_80\n.address_size 64\n{kernels}")


def with_text(content: str, **changes: Any) -> Wheel:
    """A development wheel with PTX."""
    one = replace(described(), code_kinds=("sass", "ptx"), version="0.1.0+ptx", **changes)
    image = Image("80", content.encode("latin-1") + b"\0", kind=1)
    return Wheel(one, fake_artifacts.library(one, *fake_artifacts.images("80", one), image))


TEXTS: Mapping[str, Fault] = {
    "no kernel": (
        with_text(".version 9.0\n.target sm_80\n.address_size 64\n"),
        "expected PTX of each kernel in machine code, for the same largest block",
    ),
    "no PTX of one kernel": (
        with_text(text(lambda it: it.replace(f".entry {NAME}(", ".func helper("))),
        f"largest block, found it to differ in {NAME}; build it again",
    ),
    "kernel of nobody": (
        with_text(text(lambda it: f"{it}.entry evil()\n{{\nret;\n}}\n")),
        "found it to differ in evil",
    ),
    "kernel twice": (
        with_text(text(lambda it: f"{it}.entry {NAME}()\n.maxntid 128\n{{\nret;\n}}\n")),
        f"found it to differ in {NAME}",
    ),
    "larger blocks": (
        with_text(text(threads=1024)),
        "for the same largest block, found it to diff",
    ),
    "cut short": (with_text(text()[:-2]), "expected whole PTX, found a zero byte in it, or a br"),
    "zero byte": (with_text(f"{text()}\0//"), "expected whole PTX, found a zero byte in it"),
    "32 bits": (
        with_text(text(lambda it: it.replace("_size 64", "_size 32"))),
        "expected PTX that begins with .version, .target and .address_size 64, found",
    ),
    "for a debugger": (
        with_text(text(lambda it: it.replace("sm_80", "sm_80, debug"))),
        "compile for 64 bits, without -G",
    ),
    "file of a machine": (
        with_text(text(lambda it: f'{it}.file 1 "/home/me/kernel.cu"\n')),
        "expected PTX without lines of the sources, found .file 1",
    ),
    "file whose name is no text": (
        with_text(text(lambda it: f'{it}.file 1 "\xff"\n')),
        "expected PTX without lines of the sources, found .file 1",
    ),
    "lines": (
        with_text(text(lambda it: it.replace("ret;", ".loc 1 7 9\nret;"))),
        "found .loc 1 7 9; compile without -lineinfo and -G",
    ),
    "newer than its CUDA": (
        with_text(text(lambda it: it.replace(".version 9.0", ".version 9.3"))),
        "expected PTX of version 9.0 or older, as 13.0.88 writes it, found 9.3",
    ),
}

CUBINS: Mapping[str, Fault] = {
    "made by an older CUDA": (
        of_info(sized(0x37, 129)),
        "expected CUDA, as the device code states it, ['12.9'], found ['13.0']",
    ),
    "made by two CUDAs": (
        of_info(sized(0x37, 130), sized(0x37, 129)),
        "expected one version of CUDA in a cubin, found 2 that differ",
    ),
    "end behind its code": (of_info(sized(0x1C, 16, 1 << 20)), f"found an end of {NAME} behind"),
    "barriers without a number": (
        of_info(sized(0x4C)),
        "found barriers in another format in .nv.info",
    ),
    "20 barriers": (of_info(struct.pack("<BBH", 2, 0x4C, 20)), "found 20 barriers in .nv.info"),
    "parameter without its number": (
        of_info(struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 1, 0, 0)),
        "found parameters without a number each in .nv.info",
    ),
    "parameter of another kind": (
        of_info(struct.pack("<BBHIHHI", 4, 0x17, 12, 7, 0, 0, 0)),
        "found parameters without a number each in .nv.info",
    ),
    "stack of no function": (
        planted.device(
            with_sections(Section(".nv.info", 0x70000000, sized(0x12, 77, 0))), *planted.own()[1:]
        ),
        "expected registers and stacks of functions in a cubin, found those of other symbols",
    ),
    "registers of no function": (
        planted.device(
            with_sections(Section(".nv.info", 0x70000000, sized(0x2F, 0, 8))), *planted.own()[1:]
        ),
        "expected registers and stacks of functions in a cubin, found those of other symbols",
    ),
    "parameters that are there": (
        planted.device(with_sections(Section(CONSTANTS, 1, b"evil", 0, 2)), *planted.own()[1:]),
        f"found data in {CONSTANTS}, which a driver writes",
    ),
    "more shared memory than its launch asks for": (
        launched(140_000, own=40_000),
        "expected at most 166912 bytes of shared memory for attention_fwd_bf16_hdim32, found 18",
    ),
    "code at an address": (of_header(CODE, ADDRESS, "<Q", 64), f"found {CODE} at 0x40, aligned"),
    "code aligned to a byte": (of_header(CODE, ALIGNMENT, "<Q", 1), "at 0x0, aligned to 1 bytes"),
    "code as a note": (of_header(CODE, KIND, "<I", 7), f"found {CODE} as a section of kind 0x7"),
    "attributes as data": (
        of_header(".nv.info", KIND, "<I", 1),
        "found .nv.info as a section of kind 0x1",
    ),
    "function that nobody has": (asking(b"evil"), "found a symbol that is not in it, evil"),
    "part of an unknown kind": (part(3, 5, 64, 56, 56), "found a part of kind 0x3, flags 0x5"),
    "part that is written and run": (part(1, 7, 64, 56, 56), "found a part of kind 0x1, flags 0x7"),
    "part of no section": (part(1, 5, 8, 16, 16), "flags 0x5 and 16 bytes at 0x8"),
    "part of 1 TB": (part(1, 6, 64, 56, 1 << 40), "and 1,099,511,627,776 bytes at 0x40"),
}

FAULTS = rows(texts=TEXTS, cubins=CUBINS)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | Callable[[Path], Path], sentence: str, tmp_path: Path) -> None:
    check_found_at_once(plant, sentence, tmp_path)


def test_attributes_with_any_byte_changed_are_read_or_refused() -> None:
    more = sized(0x4C, 1) + sized(0x1C, 0) + sized(0x37, 130)
    data = bytearray(with_sections(Section(INFO, 0x70000000, more, 2)).content)
    section = elf.parse(bytes(data), "cubin").named(INFO)[0]
    refused = 0
    for position in range(section.offset, section.offset + section.size):
        before = data[position]
        for value in range(256):
            data[position] = value
            try:
                cubin.read(memoryview(bytes(data)), "cubin")
            except BuildError:
                refused += 1
        data[position] = before
    assert refused >= section.size


def test_ptx_of_every_kernel_is_no_fault(tmp_path: Path) -> None:
    assert faults(with_text(text()).write(tmp_path), planted.expected()) == []


@pytest.mark.parametrize("name", [b"malloc", b"free"])
def test_what_drivers_have_is_no_fault(name: bytes, tmp_path: Path) -> None:
    assert faults(asking(name).write(tmp_path), planted.expected()) == []
