"""Faults in the device code of a wheel, and in what its manifest states of it.

The table goes on from test_planted.py: a row is a fault, how it is planted, and a part
of the sentence that reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_artifacts
import fake_elf
import planted
import pytest
from audited import Fault, check_found_at_once, rows
from fake_artifacts import Image, Wheel
from fake_elf import ALLOCATED, CUDA, Section
from planted import described

from flashvar.binaries.manifest import KernelRow, Launch
from flashvar_factory.inspect import elf

pytestmark = pytest.mark.usefixtures("auditwheel")

KERNELS = described().kernels


def kernel(**changes: Any) -> Wheel:
    """The wheel whose first kernel is another, in the manifest and in the library."""
    first = replace(KERNELS[0], **changes)
    return Wheel(replace(described(), kernels=(first, *KERNELS[1:])))


def with_ptx(image: Image) -> Wheel:
    """A development wheel with an image of PTX."""
    one = replace(described(), code_kinds=("sass", "ptx"), version="0.1.0+ptx")
    return Wheel(one, fake_artifacts.library(one, *fake_artifacts.images("80", one), image))


def records(*rows: KernelRow) -> bytes:
    return b"".join(fake_artifacts.record(row.name, row) for row in rows)


def launching(*kernels: str) -> Wheel:
    """The wheel whose first kernel launches functions of these names."""
    return kernel(launches=tuple(Launch(one, "x", "x", (128, 64), 128, 49152) for one in kernels))


def in_blocks(threads: int, registers: int) -> Wheel:
    """The wheel whose first kernel has larger blocks, as its machine code says."""
    wheel = kernel(threads=threads, registers=registers)
    first = fake_artifacts.device_code(wheel.described.kernels[0], "80", threads=threads)
    images = Image("80", first), *planted.own()[1:]
    return replace(wheel, library=fake_artifacts.library(wheel.described, *images))


def debugged() -> Image:
    """The first image with its PTX, as compilers keep it for debuggers."""
    return with_section(".nv_debug_ptx_txt", b".version 9.0\n.target sm_80\n")


def with_section(name: str, content: bytes) -> Image:
    """The first image with a section more."""
    whole = elf.parse(planted.own()[0].content, "cubin")
    parts = [
        Section(one.name, one.kind, bytes(one.content), one.link, one.flags, one.info)
        for one in whole.sections[1:-1]
    ]
    more = Section(name, 1, content)
    return Image("80", fake_elf.elf(CUDA, [*parts, more], whole.flags, 8))


def ptx(code: str, text: bytes) -> Image:
    return Image(code, text, kind=1)


CONTAINER = fake_artifacts.fatbin(planted.own()[1])
OF_DEVICE: Mapping[str, Fault] = {
    "records of nobody": (
        planted.library(
            kernels=(), more=(Section(".x.kernels", 1, records(*KERNELS), 0, ALLOCATED),)
        ),
        "expected kernel facts in .flashvar.kernels alone, found .flashvar.kernels, .x.k",
    ),
    "records twice": (
        planted.library(kernels=tuple(row.name for row in KERNELS) * 2),
        "expected each launch of attention_fwd_bf16_hdim32 once in the kernel facts",
    ),
    "image twice": (
        planted.device(planted.own()[0], *planted.own()),
        "in the manifest and 2 images",
    ),
    "functions twice, of which one is worse": (
        planted.device(planted.first(registers=255), *planted.own()),
        "in the manifest and 2 images",
    ),
    "no note of the toolkit": (
        planted.device(planted.first(toolkit=None), *planted.own()[1:]),
        "expected the note of ptxas (.note.nv.tkinfo) in machine code of CUDA 13, found none",
    ),
    "no registers": (
        planted.device(planted.first(registers=None), *planted.own()[1:]),
        "expected device code that states the registers and stack of",
    ),
    "bytes behind a cubin": (
        planted.device(replace(planted.own()[0], content=planted.own()[0].content + b"x" * 99)),
        "that is in none",
    ),
    "version of an entry": (planted.fatbin(16 + 2, "<H", 0x999), "found version 0x999"),
    "flags of an entry": (planted.fatbin(16 + 44, "<I", 1), "found version 0x101, flags 0x1000"),
    "two compressions": (planted.fatbin(16 + 40, "<I", 0xA000), "flags 0xa000"),
    "zero of an entry": (planted.fatbin(16 + 48, "<Q", 7), "0x7 in place of zero"),
    "name of an entry": (planted.fatbin(16 + 36, "<I", 1 << 30), "or a name beyond it"),
    "format of an entry": (
        planted.fatbin(16 + 26, "<H", 9),
        "expected a fatbin entry of version 1.8, as its machine code states, found one of 9.8",
    ),
    "PTX of another architecture": (
        with_ptx(replace(fake_artifacts.ptx("90"), code="80")),
        "expected a fatbin entry for 90, as its PTX states, found one for 80",
    ),
    "PTX for another architecture": (
        with_ptx(fake_artifacts.ptx("90")),
        "expected PTX only for sm_80, found some for sm_90",
    ),
    "PTX in machine code": (
        planted.device(debugged(), *planted.own()[1:]),
        "expected no PTX embedded in machine code",
    ),
    "PTX that is no text": (with_ptx(ptx("80", b"\0\1\2" * 9)), "expected PTX that begins with"),
    "cubin as PTX": (
        with_ptx(ptx("80", planted.own()[0].content)),
        "expected PTX that begins with",
    ),
    "functions of another op's kernel": (
        launching("bwd_kernel"),
        "to be bwd_kernel, as it launches, found _ZN8flashvar4sm809attention10fwd_kernel",
    ),
    "function that it launches, and has not": (
        launching("fwd_kernel, with a mask", "scan_kernel"),
        "expected a function scan_kernel of attention_fwd_bf16_hdim32, which it launches",
    ),
    "more registers than a block has": (
        in_blocks(threads=512, registers=255),
        "expected 65,536 registers in a block of attention_fwd_bf16_hdim32 at most",
    ),
    "block of 2,048 threads": (
        in_blocks(threads=2048, registers=32),
        "in a thread and 1,024 threads, found 32 in each of 2048",
    ),
    "container in machine code": (
        planted.device(with_section(".nv.x", CONTAINER), *planted.own()[1:]),
        "expected no device code embedded in machine code",
    ),
    "cubin in machine code": (
        planted.device(with_section(".nv.x", fake_artifacts.cubin({"_Zx": 8})), *planted.own()[1:]),
        "expected no cubin embedded in machine code",
    ),
    "section that drivers pass over": (
        planted.device(with_section(".evil", b"unread"), *planted.own()[1:]),
        "as ptxas writes it, found a section of no use to drivers, .evil",
    ),
    "stack that is stated, and spills that are not": (
        kernel(stack_bytes=68),
        "for the 0 bytes that it spills, found 68 bytes: it spills more than the manifest says",
    ),
}

FAULTS = rows(device=OF_DEVICE)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | planted.Plant, sentence: str, tmp_path: Path) -> None:
    check_found_at_once(plant, sentence, tmp_path)
