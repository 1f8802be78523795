"""ELF files, device code and wheels that no compiler made, for tests of what reads them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import simulated
import zstandard

from flashvar.binaries.manifest import LibraryFile, Manifest
from flashvar_factory import archive

X86_64, CUDA = 62, 190
SYMBOL = struct.Struct("<IBBHQQ")
GLOBAL_FUNCTION, WEAK, KERNEL = 0x12, 0x20, 0x10


class Section(NamedTuple):
    name: str
    kind: int = 1
    content: bytes = b""
    link: int = 0


def elf(machine: int, sections: Sequence[Section], flags: int = 0, abi: int = 0) -> bytes:
    """A file of these sections; they are numbered from 1."""
    names, offsets = _strings([section.name for section in (*sections, Section(".shstrtab"))])
    every = [*sections, Section(".shstrtab", 3, names)]
    body, rows = b"", [bytes(64)]
    for section, name in zip(every, offsets, strict=True):
        size = len(section.content)
        rows.append(
            struct.pack(
                "<2I4Q2I2Q", name, section.kind, 0, 0, 64 + len(body), size, section.link, 0, 1, 0
            )
        )
        body += section.content
    header = struct.pack(
        "<16s2HI3QI6H",
        b"\x7fELF\x02\x01\x01\x41" + bytes([abi]),
        *(3, machine, 1, 0, 0, 64 + len(body), flags, 64, 56, 0, 64, len(rows), len(rows) - 1),
    )
    return header + body + b"".join(rows)


def _strings(texts: Sequence[str]) -> tuple[bytes, list[int]]:
    table, offsets = b"\0", []
    for text in texts:
        offsets.append(len(table))
        table += text.encode() + b"\0"
    return table, offsets


def cubin(functions: Mapping[str, int], number: int = 80, abi: int = 8) -> bytes:
    """A cubin with kernels of these sizes, and a function that is none."""
    strings, offsets = _strings([*functions, "helper"])
    table = SYMBOL.pack(0, 0, 0, 0, 0, 0)
    for offset, size in zip(offsets, functions.values(), strict=False):
        table += SYMBOL.pack(offset, GLOBAL_FUNCTION, KERNEL, 1, 0, size)
    table += SYMBOL.pack(offsets[-1], GLOBAL_FUNCTION, 0, 1, 0, 8)
    shared = Section(".nv.shared", 0x7000000A)
    sections = [Section(".strtab", 3, strings), Section(".symtab", 2, table, 1), shared]
    flags = 0x6000004 | number << 8 if abi == 8 else 0x500 | number << 16 | number
    return elf(CUDA, sections, flags, abi)


@dataclass(frozen=True)
class Image:
    code: str
    content: bytes = b""
    kind: int = 2  # 1 is PTX
    compression: str | None = "zstd"


def fatbin(*images: Image) -> bytes:
    """One container."""
    entries = b""
    for image in images:
        flags = {"zstd": 0x8000, "lz4": 0x2000, None: 0}[image.compression]
        flags |= {"a": 0x100000, "f": 0x200000}.get(image.code[-1], 0)
        stored = image.content
        if image.compression == "zstd":
            stored = zstandard.ZstdCompressor().compress(stored)
        compressed = len(stored) if image.compression else 0
        padded = stored + bytes(-len(stored) % 8)
        raw = len(image.content) if image.compression else 0
        number = int(image.code.rstrip("af"))
        entries += struct.pack(
            "<HHIQIIHHIIIQQQ",
            *(image.kind, 0x101, 64, len(padded), compressed, 0, 8, 1, number, 0, 0, flags, 0, raw),
        )
        entries += padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


@dataclass(frozen=True)
class Library:
    """A library that is said to hold the kernels of a manifest; the rest are its faults."""

    exported: tuple[str, ...]
    fatbin: bytes
    kernels: tuple[str, ...]
    needed: tuple[str, ...] = ("libc.so.6",)
    run_path: str | None = None
    undefined: tuple[tuple[str, str | None], ...] = (("malloc", "GLIBC_2.2.5"),)
    machine: int = X86_64

    def build(self) -> bytes:
        versions = [version for _, version in self.undefined if version]
        texts = [*self.exported, *(name for name, _ in self.undefined), *self.needed, *versions]
        strings, offsets = _strings([*texts, self.run_path or ""])
        at = dict(zip(texts, offsets, strict=False))
        symbols, indices = [SYMBOL.pack(0, 0, 0, 0, 0, 0)], [0]
        for name in self.exported:
            symbols.append(SYMBOL.pack(at[name], GLOBAL_FUNCTION, 0, 7, 64, 8))
            indices.append(1)
        for name, version in self.undefined:
            symbols.append(SYMBOL.pack(at[name], GLOBAL_FUNCTION, 0, 0, 0, 0))
            indices.append(versions.index(version) + 2 if version else 1)
        needs = struct.pack("<HHIII", 1, len(versions), at.get("libc.so.6", 0), 16, 0)
        for i, version in enumerate(versions):
            needs += struct.pack("<IHHII", 0, 0, i + 2, at[version], 16)
        tags = [(1, at[name]) for name in self.needed]
        if self.run_path:
            tags.append((29, offsets[-1]))
        records = b"".join(
            struct.pack("<64s208x2i4i", name.encode(), 128, 0, 64, 64, 0, 0)
            for name in self.kernels
        )
        return elf(
            self.machine,
            [
                Section(".dynstr", 3, strings),
                Section(".dynsym", 11, b"".join(symbols), 1),
                Section(".gnu.version", 0x6FFFFFFF, struct.pack(f"<{len(indices)}H", *indices), 2),
                Section(".gnu.version_r", 0x6FFFFFFE if versions else 1, needs, 1),
                Section(".dynamic", 6, b"".join(struct.pack("<qQ", *tag) for tag in tags), 1),
                Section(".nv_fatbin", 1, self.fatbin),
                Section(".flashvar.kernels", 1, records),
            ],
        )


def functions_of(name: str) -> tuple[str, ...]:
    """The device functions that a kernel of a fabricated manifest launches."""
    return (f"_Z{name}_aligned", f"_Z{name}_any")


def manifest(code: str = "80", ops: tuple[str, ...] = ("attention_fwd",)) -> Manifest:
    """Two kernels of each op, bf16 with head dims 32 and 64."""
    paper = simulated.manifest(code, (32, 64), ("bf16",), ops)
    kernels = tuple(replace(row, functions=functions_of(row.name)) for row in paper.kernels)
    return replace(paper, kernels=kernels, platform="linux_x86_64")


def images(code: str, described: Manifest) -> list[Image]:
    """One image per kernel."""
    number = int(code.rstrip("af"))
    return [
        Image(code, cubin(dict.fromkeys(row.functions, 1000), number)) for row in described.kernels
    ]


def library(described: Manifest, *device: Image) -> Library:
    """What the manifest describes, with this device code or its own."""
    every = device or images(described.architecture.code, described)
    ops = dict.fromkeys(row.op for row in described.kernels)
    names = ("abi_version", "build_info", "last_error", *ops)
    return Library(
        exported=tuple(f"flashvar_{name}" for name in names),
        fatbin=b"".join(fatbin(image) for image in every),
        kernels=tuple(row.name for row in described.kernels),
    )


@dataclass
class Wheel:
    """A wheel with nothing against it, until a test changes something."""

    described: Manifest = field(default_factory=manifest)
    library: Library | None = None
    stem: str = "flashvar_sm80"
    platform: str = "manylinux_2_28_x86_64"
    label: str = ""
    more: dict[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Its file."""
        built = (self.library or library(self.described)).build()
        file = LibraryFile(f"lib{self.stem}.so", len(built), hashlib.sha256(built).hexdigest())
        described = replace(self.described, library=file)
        name, version = self.stem, self.described.version
        info = f"{name}-{version}.dist-info"
        entry = f"[flashvar.binaries]\n{described.architecture.name} = {self.stem}\n"
        files = {
            f"{name}/{file.file}": built,
            f"{name}/manifest.json": described.to_json().encode(),
            f"{info}/METADATA": b"Metadata-Version: 2.1\n",
            f"{info}/entry_points.txt": entry.encode(),
            **self.more,
        }
        path = folder / f"{name}-{version}-py3-none-{self.platform}{self.label}.whl"
        archive.write(path, files, info)
        return path


def variant(label: str, *architectures: str) -> dict[str, bytes]:
    """The variant.json of a fabricated wheel."""
    document = {"variants": {label: {"nvidia": {"sm_arch": list(architectures)}}}}
    return {"flashvar_sm80-0.1.0.dist-info/variant.json": json.dumps(document).encode()}
