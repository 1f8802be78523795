"""Faults that take time or memory: small archives of which a reader makes much.

The table goes on from test_planted.py: a row is a fault, how it is planted, and a part
of the sentence that reports it. Noise is beside what repeats itself: archives that compress too
well are refused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import fake_artifacts
import fake_elf
import planted
import pytest
from audited import Fault, check_found_at_once, rows
from fake_artifacts import Wheel
from fake_elf import Section
from planted import described, later
from test_planted_loading import packed
from test_planted_readers import changed, header

from flashvar_factory.inspect import elf

pytestmark = pytest.mark.usefixtures("auditwheel")

TIMES = 90  # what repeats itself may be longer than noise


def noise(size: int) -> Section:
    return Section(".noise", 1, os.urandom(size // TIMES), 0, fake_elf.ALLOCATED)


def behind(code: bytes) -> Wheel:
    """The wheel with bytes behind its device code."""
    one = fake_artifacts.library(described())
    return planted.library(fatbin=one.fatbin + code, more=(noise(len(code)),))


def symbols(count: int, name: str) -> Wheel:
    """The wheel with a table of this many symbols, which share a name."""
    size = count * fake_elf.SYMBOL.size

    def change(data: bytearray, file: elf.Elf) -> None:
        at = bytes(file.named(".dynstr")[0].content).index(name.encode())
        row = fake_elf.SYMBOL.pack(at, fake_elf.GLOBAL_FUNCTION, 0, 8, 1, 1)
        struct.pack_into("<QQ", data, header(data, file, ".dynsym") + 24, len(data), size)
        data += row * count

    return changed(change, noise(size), needed=("libc.so.6", name))


def sections(count: int) -> Wheel:
    """The wheel with this many notes, and many segments of notes."""

    def change(data: bytearray, file: elf.Elf) -> None:
        at = header(data, file, ".rodata")
        row = bytearray(data[at : at + 64])
        struct.pack_into("<I", row, 4, fake_elf.NOTES)
        data += bytes(row) * count
        struct.pack_into("<H", data, 60, len(file.sections) + count)

    many = [fake_elf.Segment(4, 4, ".dynamic")] * 60
    return changed(change, noise(64 * count), segments=(*fake_elf.LOADED, *many))


def comments() -> Wheel:
    """The wheel with the beginning of PTX again and again."""
    comment = b"//" + b".target//" * 21 + b"\n"
    return planted.library(more=(Section(".x", 1, comment * 20_000, 0, 2), noise(4_000_000)))


def relocated() -> Wheel:
    """The wheel with packed relocations, 63 in each number."""
    table = b"\xff" * 4_000_000
    return packed(*struct.unpack("<500000Q", table), more=(noise(len(table)),))


FLOODS: Mapping[str, Fault] = {
    "40,000,000 zeros": (
        later(lambda: behind(bytes(40_000_000))),
        "expected at most 4,096 zeros between",
    ),
    "1,000,000 containers": (
        later(lambda: behind(fake_artifacts.fatbin() * 1_000_000)),
        "expected at most 4,096 containers of device code",
    ),
    "names of 160 MB": (
        later(symbols, 20_000, "a" * 8000),
        "expected at most 67,108,864 bytes of names in .dynsym",
    ),
    "50,000 faults": (
        later(symbols, 50_000, "evil"),
        "expected at most 200 errors of one kind to list, found more",
    ),
    "60,000 sections": (later(sections, 60_000), "expected at most 1,024 sections, found 60,0"),
    "beginnings of PTX": (
        later(comments),
        "expected PTX in .nv_fatbin alone, found it at byte",
    ),
    "30,000,000 packed relocations": (
        later(relocated),
        "expected at most 262,144 packed relocations, found more",
    ),
}
FAULTS = rows(floods=FLOODS)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | planted.Plant, sentence: str, tmp_path: Path) -> None:
    check_found_at_once(plant, sentence, tmp_path)
