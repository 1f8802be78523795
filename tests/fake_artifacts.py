"""Fake libraries, device code and wheels, which no compiler made, for tests of what reads them.

One file, since each part of a wheel states facts of the others.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fakes
import zstandard
from fake_elf import (
    ALLOCATED,
    CUDA,
    EXECUTABLE,
    GLOBAL_FUNCTION,
    KERNEL,
    LOADED,
    LOADED_CODE,
    SECTION,
    SYMBOL,
    X86_64,
    Section,
    Segment,
    addresses,
    elf,
    string_table,
)

from flashvar.binaries.kinds import SECOND, Kernel
from flashvar.binaries.manifest import ABI, KernelRow, Launch, LibraryFile, Manifest
from flashvar_factory.build import binary_project, sbom
from flashvar_factory.config.expand import Selection, expand
from flashvar_factory.config.schema import Config
from flashvar_factory.inspect import archive, symbol_hash, variant_metadata

REGISTERS = 168  # of a fake kernel
HASH = "0" * 64  # of the sources


def cubin(
    functions: Mapping[str, int],
    number: int = 80,
    abi: int = 8,
    *,
    code: str | None = None,
    toolkit: str | None = None,
    registers: int | None = None,
    stack: int = 0,
    threads: int | None = None,
) -> bytes:
    """A cubin with kernels of these sizes, and a function that is none."""
    strings, offsets = string_table([*functions, "helper"])
    table, info, texts = SYMBOL.pack(0, 0, 0, 0, 0, 0), b"", []
    for index, (offset, (name, size)) in enumerate(
        zip(offsets, functions.items(), strict=False), start=1
    ):
        # Behind the tables of strings and symbols, and shared memory.
        table += SYMBOL.pack(offset, GLOBAL_FUNCTION, KERNEL, index + 3, 0, size)
        stated = (registers or 0) << 24 if number < 90 else 0
        texts.append(Section(f".text.{name}", 1, bytes(size), 0, LOADED_CODE, stated | index))
        if registers is not None:
            info += struct.pack("<BBHII", 4, 0x2F, 8, index, registers)
            info += struct.pack("<BBHII", 4, 0x11, 8, index, stack)
    table += SYMBOL.pack(offsets[-1], GLOBAL_FUNCTION, 0, 1, 0, 8)
    shared = Section(".nv.shared", 0x7000000A)
    sections = [Section(".strtab", 3, strings), Section(".symtab", 2, table, 1), shared, *texts]
    if info:
        sections.append(Section(".nv.info", 0x70000000, info, 2))
    if threads is not None:
        block = struct.pack("<BBHIII", 4, 0x05, 12, threads, 1, 1)
        sections += [Section(f".nv.info.{name}", 0x70000000, block, 2) for name in functions]
    if toolkit is not None:
        note = f"ptxas\0Cuda compilation tools, release 13.0, V{toolkit}\0-arch sm_{code} \0"
        sections.append(Section(".note.nv.tkinfo", 7, note.encode()))
    old = 0x500 | number << 16 | number
    flags = 0x6000000 | number << 8 | (2 if number >= 100 else 4) if abi == 8 else old
    return elf(CUDA, sections, flags, abi)


@dataclass(frozen=True)
class Image:
    code: str
    content: bytes = b""
    kind: int = 2  # 1 is PTX
    compression: str | None = "zstd"

    @property
    def form(self) -> tuple[int, int]:
        """Minor and major version: of PTX, or the ABI of a cubin and 1."""
        if self.kind == 2:
            return (self.content[8] if len(self.content) > 8 else 8), 1
        found = re.search(rb"\.version (\d+)\.(\d+)", self.content)
        return (int(found[2]), int(found[1])) if found else (0, 9)


def ptx(code: str = "80") -> Image:
    """PTX for an architecture."""
    text = f"//\n.version 9.0\n.target sm_{code}\n.address_size 64\n"
    return Image(code, text.encode(), kind=1)


@cache
def fatbin(*images: Image) -> bytes:
    """One container."""
    entries = b""
    for image in images:
        flags = 0x11 | {"zstd": 0x8000, "lz4": 0x2000, None: 0}[image.compression]
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
            *(image.kind, 0x101, 64, len(padded), compressed, 0, *image.form, number),
            *(0, 0, flags, 0, raw),
        )
        entries += padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def record(name: str, row: KernelRow | None = None) -> bytes:
    """What a library records of a kernel: its launches, of which one has no name where none has."""
    plain = Launch(
        "", "", "", *((row.tile, row.threads, row.shared_memory) if row else ((), 128, 0))
    )
    return b"".join(
        struct.pack(
            "<64s32s16s160s2i4i",
            *(text.encode() for text in (name, one.kernel, one.family, one.when)),
            *(one.threads, one.shared_memory, *(*one.tile, 0, 0, 0, 0)[:4]),
        )
        for one in (row.launches if row else ()) or (plain,)
    )


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
    described: Manifest | None = None
    soname: str | None = None
    abi: int = ABI
    info: str | None = None  # what it states of its build
    segments: tuple[Segment, ...] = LOADED
    tags: tuple[tuple[int, int], ...] = ((30, 8),)  # BIND_NOW
    more: tuple[Section, ...] = ()
    exported_kind: int = GLOBAL_FUNCTION
    hashed: bool = True
    starts: tuple[tuple[int, int], ...] = ()  # symbols of sections: section, and bytes behind it

    def build(self, stem: str = "flashvar_sm80") -> bytes:
        soname = f"lib{stem}.so" if self.soname is None else self.soname
        versions = [version for _, version in self.undefined if version]
        texts = [*self.exported, *(name for name, _ in self.undefined), *self.needed, *versions]
        strings, offsets = string_table([*texts, self.run_path or "", soname])
        at = dict(zip(texts, offsets, strict=False))
        needs = struct.pack("<HHIII", 1, len(versions), at.get("libc.so.6", 0), 16, 0)
        for i, version in enumerate(versions):
            needs += struct.pack("<IHHII", symbol_hash.system_v(version), 0, i + 2, at[version], 16)
        tags = [(1, at[name]) for name in self.needed]
        tags += [(29, offsets[-2])] if self.run_path else []
        tags += [(14, offsets[-1])] if soname else []
        tags += [(0x6FFFFEF5, 0)] if self.hashed else []
        tags += [*self.tags, (5, 0), (6, 0), (10, len(strings)), (0x6FFFFFF0, 0)]
        tags += [(0x6FFFFFFE, 0), (0x6FFFFFFF, 1)] if versions else []
        indices = [
            0,
            *(0 for _ in self.starts),
            *(versions.index(v) + 2 if v else 1 for _, v in self.undefined),
        ]
        indices += [1 for _ in self.exported]
        rows = {row.name: row for row in (self.described.kernels if self.described else ())}
        records = b"".join(record(name, rows.get(name)) for name in self.kernels)
        loaded = ALLOCATED
        sections = [
            Section(".dynstr", 3, strings, 0, loaded),
            Section(".dynsym", 11, self._symbols(at, 0, {}), 1, loaded, 1 + len(self.starts)),
            Section(
                ".gnu.version", 0x6FFFFFFF, struct.pack(f"<{len(indices)}H", *indices), 2, loaded
            ),
            Section(".gnu.version_r", 0x6FFFFFFE if versions else 1, needs, 1, loaded, 1),
            Section(".dynamic", 6, _dynamic(tags), 1, loaded),
            Section(".nv_fatbin", 1, self.fatbin, 0, loaded),
            Section(".flashvar.kernels", 1, records, 0, loaded),
            Section(".text", 1, self._code() * len(self.exported), 0, loaded | EXECUTABLE),
            Section(".rodata", 1, self._info(), 0, loaded),
            *([Section(".gnu.hash", 0x6FFFFFF6, self._hashes(), 2, loaded)] if self.hashed else []),
            *self.more,
        ]
        places = addresses(sections, len(self.segments))
        starts = {i: places[one.name] for i, one in enumerate(sections, start=1)}
        content = self._symbols(at, places[".text"], starts)
        sections[1] = sections[1]._replace(content=content)
        homes = {0x6FFFFEF5: ".gnu.hash", 5: ".dynstr", 6: ".dynsym", 0x6FFFFFF0: ".gnu.version"}
        homes |= {0x6FFFFFFE: ".gnu.version_r", 4: ".hash"}
        tags = [
            (tag, value or places[homes[tag]]) if tag in homes else (tag, value)
            for tag, value in tags
        ]
        sections[4] = sections[4]._replace(content=_dynamic(tags))
        return elf(self.machine, sections, segments=self.segments)

    def _symbols(self, at: Mapping[str, int], text: int, starts: Mapping[int, int]) -> bytes:
        table = SYMBOL.pack(0, 0, 0, 0, 0, 0)
        for section, behind in self.starts:
            table += SYMBOL.pack(0, SECTION, 0, section, starts.get(section, 0) + behind, 0)
        for name, _ in self.undefined:
            table += SYMBOL.pack(at[name], GLOBAL_FUNCTION, 0, 0, 0, 0)
        size = len(self._code())
        for place, name in enumerate(self.exported):
            table += SYMBOL.pack(at[name], self.exported_kind, 0, 8, text + size * place, size)
        return table

    def _hashes(self) -> bytes:
        """One bucket of all that is exported, and a filter that lets everything through."""
        first = 1 + len(self.starts) + len(self.undefined)
        header = struct.pack("<4IQI", 1, first, 1, 6, (1 << 64) - 1, first if self.exported else 0)
        hashes = [symbol_hash.gnu(name) & ~1 for name in self.exported]
        hashes[-1:] = [one | 1 for one in hashes[-1:]]  # the last of its bucket
        return header + struct.pack(f"<{len(hashes)}I", *hashes)

    def _code(self) -> bytes:
        """`return abi`, which each function does here."""
        if self.machine == X86_64:
            return b"\xb8" + struct.pack("<I", self.abi) + b"\xc3"
        return struct.pack("<II", 0x52800000 | self.abi << 5, 0xD65F03C0)

    def _info(self) -> bytes:
        if self.info is not None:
            return self.info.encode()
        if self.described is None:
            return b""
        one = self.described
        stated = {"architecture": one.architecture.name, "version": one.version}
        return json.dumps({**stated, "source_hash": one.source.hash}).encode() + b"\0"


def _dynamic(tags: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<qQ", *tag) for tag in (*tags, (0, 0)))


def functions_of(name: str) -> tuple[str, ...]:
    """The device functions that a kernel of a fake_artifacts manifest launches."""
    return (f"_Z{name}_aligned", f"_Z{name}_any")


def manifest(code: str = "80", ops: tuple[str, ...] = ("attention_fwd",)) -> Manifest:
    """Two kernels of each op, bf16 with head dims 32 and 64."""
    fake = fakes.manifest(code, (32, 64), ("bf16",), ops)
    kernels = tuple(replace(row, functions=functions_of(row.name)) for row in fake.kernels)
    return replace(fake, kernels=kernels, platform="linux_x86_64")


def mangled(kernel: Kernel, number: int = 80, limit: int = 166912) -> str:
    """A function's name with the template arguments of a kernel."""
    axes = dict(kernel.axes)
    first = axes.get("head_dim")
    second = axes.get(f"head_dim{SECOND}", first)
    dims = "" if first is None else f"Li{first}ELi{second}E"
    dtype = str(axes["dtype"])
    name = f"{kernel.function.rpartition('_')[2]}_kernel"
    return (
        f"_ZN8flashvar4sm809attention{len(name)}{name}INS1_6ConfigINS_6TargetILi{number}ELi{limit}EEE"
        f"NS_5dtype{len(dtype)}{dtype}E{dims}Lb0EEEEEvNS1_4ArgsE"
    )


def complete(config: Config, name: str) -> Manifest:
    """All kernels of one architecture, as variants.toml lists them."""
    (build,) = expand(config, Selection((name,), config.default_ops, {}))
    target = config.targets[name]
    fake = manifest(target.kind.name)
    number = int(target.architecture.code.rstrip("af"))
    kernels = tuple(
        replace(
            fake.kernels[0],
            function=kernel.function,
            axes=kernel.axes,
            name=kernel.name,
            family=target.family,
            functions=(mangled(kernel, number, target.shared_memory),),
        )
        for kernel in build.kernels
    )
    return replace(fake, architecture=target.architecture, kernels=kernels, ran=target.ran)


def images(code: str, described: Manifest) -> list[Image]:
    """One image per kernel. For 10.0 and newer CUDA 12 writes the format of CUDA 13, and a note."""
    ptxas, new = described.toolkit.ptxas, int(code.rstrip("af")) >= 100
    older = {"toolkit": ptxas if new else None, "abi": 8 if new else 7} if ptxas else {}
    compression = None if ptxas else Image.compression
    return [
        Image(code, device_code(row, code, **older), compression=compression)
        for row in described.kernels
    ]


def device_code(row: KernelRow, built_for: str, **changes: Any) -> bytes:
    """The cubin of a kernel."""
    facts: dict[str, Any] = {
        "code": built_for,
        "toolkit": "13.0.88",
        "registers": row.registers,
        "threads": 128,
    }
    facts["stack"] = row.stack_bytes
    return _cubin(row.functions, int(built_for.rstrip("af")), **{**facts, **changes})


@cache
def _cubin(functions: tuple[str, ...], number: int, **facts: Any) -> bytes:
    """Made once: tests share a few hundred kernels, and most plant their fault elsewhere."""
    return cubin(dict.fromkeys(functions, 1000), number, **facts)


def library(described: Manifest, *device: Image) -> Library:
    """What the manifest describes, with this device code or its own."""
    every = device or images(described.architecture.code, described)
    ops = dict.fromkeys(row.function for row in described.kernels)
    names = ("abi_version", "build_info", "last_error", *ops)
    return Library(
        exported=tuple(f"flashvar_{name}" for name in names),
        fatbin=b"".join(fatbin(image) for image in every),
        kernels=tuple(row.name for row in described.kernels),
        described=described,
    )


@cache
def _own(described: Manifest, stem: str) -> bytes:
    return library(described).build(stem)


def sbom_of(described: Manifest, **changes: Any) -> dict[str, Any]:
    """The SBOM of a wheel."""
    name, version, source = described.distribution, described.version, described.source
    toolkit = described.toolkit
    runtime = toolkit.machine_code.rpartition(".")[0]
    words = {"type": "library", "description": sbom.linked("libcudart_static.a")}
    inside = {**_of_nvidia("cudart-static", runtime), **words}
    del inside["scope"]
    file = described.library.file
    library = {"type": "file", "bom-ref": file, "name": file, "version": version}
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": name,
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{quote(version, safe='')}",
                "description": f"Machine code for {described.architecture.code}, "
                f"{described.platform}",
                "licenses": [{"expression": "Apache-2.0"}],
                "pedigree": {"commits": [{"uid": source.revision}]},
                "properties": [
                    {"name": "source:dirty", "value": str(source.dirty).lower()},
                    {"name": "source:hash", "value": source.hash},
                ],
                "components": [{**library, "hashes": [_sha256(described.library.sha256)]}],
            }
        },
        "components": [
            _compiler("GNU-c++", "12.2.0"),
            _of_nvidia("nvcc", toolkit.version),
            *([_of_nvidia("ptxas", toolkit.ptxas)] if toolkit.ptxas else []),
            {**inside, "hashes": [_sha256("e" * 64)]},
        ],
        "dependencies": [
            {"ref": "GNU-c++"},
            {"ref": "nvcc"},
            *([{"ref": "ptxas"}] if toolkit.ptxas else []),
            {"ref": "cudart-static"},
            {"ref": name, "dependsOn": ["cudart-static"]},
        ],
    }
    return {**document, **changes}


def _compiler(name: str, version: str) -> dict[str, Any]:
    named = {"type": "application", "bom-ref": name, "name": name, "version": version}
    return {**named, "description": sbom.DESCRIPTIONS["C++"], "scope": "excluded"}


def _of_nvidia(name: str, version: str) -> dict[str, Any]:
    licensed = [{"license": {"name": sbom.NVIDIA}}]
    purl = f"pkg:generic/{name}@{version}"
    words = sbom.DESCRIPTIONS.get(name, "")
    return {**_compiler(name, version), "licenses": licensed, "purl": purl, "description": words}


def _sha256(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}


@dataclass
class Wheel:
    """A wheel with nothing against it, until a test changes something."""

    described: Manifest = field(default_factory=manifest)
    library: Library | None = None
    stem: str = "flashvar_sm80"
    platform: str = "manylinux_2_28_x86_64"
    label: str = ""
    more: dict[str, bytes] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """What is in it."""
        built = self.library.build(self.stem) if self.library else _own(self.described, self.stem)
        file = LibraryFile(f"lib{self.stem}.so", len(built), hashlib.sha256(built).hexdigest())
        one = replace(self.described, library=file)
        name, info = self.stem, self.info
        major, minor = one.architecture.capability
        entry = f"[flashvar.binaries]\n{one.kind.name} = {self.stem}\n"
        metadata = (
            f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {one.version}\n"
            f"Summary: Compiled flashvar kernels for compute capability {major}.{minor}\n"
            "License-Expression: Apache-2.0\nLicense-File: LICENSE\nRequires-Python: >=3.10\n"
            "Description-Content-Type: text/markdown\n\n"
            + binary_project.readme_of("flashvar", name.replace("_", "-"), one.architecture)
        )
        wheel = (
            "Wheel-Version: 1.0\nGenerator: scikit-build-core 1.1.2\nRoot-Is-Purelib: false\n"
            f"Tag: py3-none-{self.platform}\n\n"
        )
        return {
            f"{name}/{file.file}": built,
            f"{name}/manifest.json": one.to_json().encode(),
            f"{info}/METADATA": metadata.encode(),
            f"{info}/WHEEL": wheel.encode(),
            f"{info}/entry_points.txt": entry.encode(),
            f"{info}/licenses/LICENSE": b"Apache\n",
            f"{info}/sboms/{one.distribution}.cdx.json": (
                json.dumps(sbom_of(one), indent=1) + "\n"
            ).encode(),
            **self.more,
        }

    @property
    def info(self) -> str:
        return f"{self.stem}-{self.described.version}.dist-info"

    def write(self, folder: Path) -> Path:
        """Its file."""
        name = f"{self.stem}-{self.described.version}-py3-none-{self.platform}{self.label}.whl"
        path = folder / name
        archive.write(path, self.files(), self.info)
        return path


def variant(label: str, *architectures: str) -> dict[str, bytes]:
    """The variant.json of a fake_artifacts wheel."""
    document = {"variants": {label: {"nvidia": {"sm_arch": list(architectures)}}}}
    return {"flashvar_sm80-0.1.0.dist-info/variant.json": variant_metadata.text(document).encode()}
