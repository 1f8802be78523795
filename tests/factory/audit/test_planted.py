"""A whole wheel of the factory with one planted fault each: every one is found, and said in words.

A row is a fault: its name, how it is planted, and a part of the sentence that reports it. The wheel
has no other fault: a row shows a check that nothing else makes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import fake_artifacts
import fake_elf
import pytest
from audited import Fault, faults, rows
from fake_artifacts import Image, Wheel
from fake_elf import Section, Segment
from planted import (
    ENTRIES,
    LIBRARY,
    MANIFEST,
    METADATA,
    SBOM,
    WHEEL,
    added,
    called,
    described,
    device,
    edited,
    elf,
    expected,
    fatbin,
    first,
    for_older_drivers,
    library,
    manifest,
    of_part,
    of_sbom,
    older,
    own,
    row,
    sbom,
    stated,
    with_files,
)

from flashvar.binaries.manifest import Launch, MinimumDriver, SourceRevision, Toolkit

pytestmark = pytest.mark.usefixtures("auditwheel")

KERNELS = described().kernels
SHA256 = json.loads(Wheel(described()).files()[MANIFEST])["library"]["sha256"]
NOISE = random.Random(0).randbytes(600_000).hex().encode()
SWAPPED = (
    replace(KERNELS[0], functions=KERNELS[1].functions),
    replace(KERNELS[1], functions=KERNELS[0].functions),
    *KERNELS[2:],
)
RENAMED = tuple(
    replace(one, functions=(one.functions[0].replace("Li80ELi166912E", "Li86ELi101376E"),))
    for one in KERNELS
)
WRITABLE = tuple(
    segment._replace(flags=7) if segment.kind == 1 else segment for segment in fake_elf.LOADED
)
OTHER = fake_artifacts.fatbin(Image("86", fake_artifacts.cubin({}, 86)))
PTX = b"//\n.version 8.0\n.target sm_80\n.address_size 64\n"
EXECUTABLE_STACK = tuple(
    segment._replace(flags=7) if segment.kind == 0x6474E551 else segment
    for segment in fake_elf.LOADED
)


OF_METADATA: Mapping[str, Fault] = {
    "name": (edited(METADATA, "Name: flashvar-sm80", "Name: flashvar-sm86"), "expected name"),
    "version": (
        edited(METADATA, "\nVersion: 0.1.0", "\nVersion: 0.1.1"),
        "expected version '0.1.0'",
    ),
    "requirement": (
        edited(METADATA, "\n\n", "\nRequires-Dist: evil\n\n"),
        "expected requirements [], found ['evil",
    ),
    "requirement by address": (
        edited(METADATA, "\n\n", "\nRequires-Dist: evil @ https://example.org/evil.whl\n\n"),
        "expected requirements [], found ['evil @ https://example.org/evil.whl']",
    ),
    "extra": (edited(METADATA, "\n\n", "\nProvides-Extra: evil\n\n"), "found ['Provides-Extra']"),
    "obsoletes": (
        edited(METADATA, "\n\n", "\nObsoletes-Dist: torch\n\n"),
        "found ['Obsoletes-Dist']",
    ),
    "dynamic": (edited(METADATA, "\n\n", "\nDynamic: Version\n\n"), "metadata"),
    "field of nobody": (
        edited(METADATA, "\n\n", "\nX-Evil: 1\n\n"),
        "unrecognized field: 'x-evil'",
    ),
    "name twice": (edited(METADATA, "Name: ", "Name: a\nName: "), "expected valid core metadata"),
    "summary": (
        edited(METADATA, "capability 8.0", "capability 9.0"),
        "expected summary 'Compiled flashvar kernels for compute capability 8.0'",
    ),
    "license": (
        edited(METADATA, "Apache-2.0", "MIT"),
        "expected license 'Apache-2.0', found 'MIT'",
    ),
    "license of nobody": (
        edited(METADATA, "Apache-2.0", "Evil-1.0"),
        "expected valid core metadata",
    ),
    "no license": (edited(METADATA, "License-Expression: Apache-2.0\n", ""), "found None"),
    "older Python": (edited(METADATA, ">=3.10", ">=3.6"), "expected Python '>=3.10'"),
    "no Python": (edited(METADATA, "Requires-Python: >=3.10\n", ""), "expected Python '>=3.10'"),
    "description": (edited(METADATA, "\n\n", "\n\nBuy now"), "found 'Buy now"),
    "half a description": (
        edited(METADATA, "# flashvar-sm80", ""),
        "expected description '# flash",
    ),
    "description of another kind": (
        edited(METADATA, "text/markdown", "text/x-rst"),
        "expected content type of the description 'text/markdown', found 'text/x-rst'",
    ),
    "not UTF-8": (added(METADATA, b"Metadata-Version: 2.4\nName: \xff\n"), "expected UTF-8"),
    "not metadata": (added(METADATA, b"x" * 100), "expected valid core metadata"),
    "huge": (added(METADATA, NOISE), "expected at most 1,048,576 bytes"),
    "tag of a Python": (
        edited(WHEEL, "py3-none-manylinux", "cp311-cp311-manylinux"),
        "expected tags ['py3-none-manylinux_2_28_x86_64']",
    ),
    "file name of a Python": (
        called("flashvar_sm80-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"),
        "expected the tag py3-none-<platform> of a wheel without Python extension modules",
    ),
    "number of a build": (
        called("flashvar_sm80-0.1.0-1evil-py3-none-manylinux_2_28_x86_64.whl"),
        "expected the file name flashvar_sm80-0.1.0-py3-none-manylinux_2_28_x86_64.whl",
    ),
    "second tag": (
        edited(WHEEL, "Tag: ", "Tag: py3-none-any\nTag: "),
        "expected tags ['py3-none-manylinux_2_28_x86_64']",
    ),
    "no tag": (edited(WHEEL, "Tag: ", "Tog: "), "expected fields"),
    "purelib": (edited(WHEEL, "Purelib: false", "Purelib: true"), "('Root-Is-Purelib', 'true')"),
    "version of WHEEL": (
        edited(WHEEL, "Wheel-Version: 1.0", "Wheel-Version: 2.0"),
        "expected fields",
    ),
    "build": (edited(WHEEL, "\n\n", "\nBuild: 1\n\n"), "expected fields"),
    "two generators": (edited(WHEEL, "\n\n", "\nGenerator: a 1\n\n"), "expected one Generator"),
    "line that is none": (edited(WHEEL, "\n\n", "\nevil\n\n"), "('', 'evil')"),
    "entry point of another group": (
        edited(ENTRIES, "flashvar.binaries", "flashvar.others"),
        "by which flashvar finds it",
    ),
    "console script as an entry point": (
        added(
            ENTRIES, b"[flashvar.binaries]\nsm_80 = flashvar_sm80\n[console_scripts]\npip = x:y\n"
        ),
        "by which flashvar finds it",
    ),
    "entry point of another folder": (
        edited(ENTRIES, "= flashvar_sm80", "= flashvar_sm86"),
        "flashvar_sm86/manifest.json: expected sm_80's manifest, found none",
    ),
    "second entry point": (
        edited(ENTRIES, "\nsm_80", "\nsm_89 = flashvar_sm80\nsm_80"),
        "by which flashvar finds it",
    ),
    "pytest plugin": (
        edited(ENTRIES, "[flashvar", "[pytest11]\nx = y\n[flashvar"),
        "by which flashvar finds it",
    ),
}

OF_SBOM: Mapping[str, Fault] = {
    "not JSON": (added(SBOM, b"{"), "expected JSON"),
    "deep": (added(SBOM, b"[" * 60_000), "expected JSON"),
    "key twice": (edited(SBOM, "{", '{"bomFormat": "CycloneDX", '), "a key twice in one object"),
    "list": (added(SBOM, b"[]\n"), "expected CycloneDX as this factory writes it"),
    "empty": (added(SBOM, b"{}\n"), "expected CycloneDX as this factory writes it"),
    "other format": (sbom(lambda one: one.update(specVersion="1.2")), "expected format"),
    "other name": (of_sbom(name="x"), "expected component ('flashvar-sm80', '0.1.0')"),
    "other version": (of_sbom(version="9"), "expected component"),
    "other purl": (of_sbom(purl="pkg:pypi/x@1"), "expected purl"),
    "other license": (of_sbom(licenses=[{"expression": "MIT"}]), "expected license"),
    "other commit": (of_sbom(pedigree={"commits": [{"uid": "1" * 40}]}), "expected commits"),
    "other description": (of_sbom(description="x"), "expected description"),
    "other source": (
        of_sbom(properties=[{"name": "source:hash", "value": "1"}]),
        "expected source",
    ),
    "no library": (of_sbom(components=[]), "expected library"),
    "other hash of the library": (
        edited(SBOM, SHA256, "0" * 64),
        "expected library",
    ),
    "other nvcc": (of_part("nvcc", version="12.0.0"), "expected nvcc '13.0.88'"),
    "other cudart": (of_part("cudart-static", version="12.0"), "expected cudart-static '13.0'"),
    "hash that is none": (
        of_part("cudart-static", hashes=[{"alg": "SHA-256", "content": "z"}]),
        "expected hashes of cudart-static 'one SHA-256'",
    ),
    "no hash": (
        of_part("cudart-static", hashes=[]),
        "expected hashes of cudart-static 'one SHA-256'",
    ),
    "component of nobody": (
        sbom(lambda one: one["components"].append({"name": "openssl", "version": "1"})),
        "expected components",
    ),
    "component less": (sbom(lambda one: one["components"].pop()), "as this factory writes it"),
    "component twice": (
        sbom(lambda one: one["components"].append(one["components"][0])),
        "expected components, each once,",
    ),
    "dependency": (
        sbom(lambda one: one["dependencies"].append({"ref": "x"})),
        "expected dependencies",
    ),
}

OLDER_WITH_NEWER = Wheel(
    for_older_drivers(),
    fake_artifacts.library(for_older_drivers(), *fake_artifacts.images("80", described())),
    "flashvar_sm80_cu12",
)

OF_MANIFEST: Mapping[str, Fault] = {
    "abi": (manifest(abi=1), "expected ABI, as the library returns it, 2, found 1"),
    "abi of the library": (library(abi=3), "expected ABI, as the library returns it, 3, found 2"),
    "older driver": (
        manifest(minimum_driver=MinimumDriver((12, 0), "525")),
        "expected minimum driver of that toolkit",
    ),
    "other name of the driver": (
        manifest(minimum_driver=MinimumDriver((13, 0), "525")),
        "expected minimum driver of that toolkit",
    ),
    "machine code of a newer CUDA than the driver": (
        OLDER_WITH_NEWER,
        "expected format of the device code to be that of ['CUDA 12'], found ['CUDA 13']",
    ),
    "compression that the driver does not know": (
        older(compression="zstd"),
        "expected CUDA version of the minimum driver 12.4 or newer",
    ),
    "ptxas of nobody": (
        older(toolkit=Toolkit("nvcc", "13.0.88", "12.8.93")),
        "expected ptxas of variants.toml 12.9.86, found 12.8.93",
    ),
    "a claim to have run": (
        manifest(ran="own"),
        "expected ran (where its kernels have run, by variants.toml) ptx, found own",
    ),
    "other toolkit": (
        manifest(toolkit=Toolkit("nvcc", "13.1.0")),
        "expected toolkit, as the device code states it, ['13.0.88'], found ['13.1.0']",
    ),
    "toolkit that is none": (
        manifest(toolkit=Toolkit("nvcc", "x")),
        "expected toolkit three numbers",
    ),
    "old toolkit": (
        manifest(toolkit=Toolkit("nvcc", "11.0.0")),
        "expected toolkit 12.0 or newer",
    ),
    "other compiler": (manifest(toolkit=Toolkit("clang", "13.0.88")), "expected compiler nvcc"),
    "other architecture within": (
        library(info=stated("sm_86", "0.1.0")),
        "as the library states them,",
    ),
    "other version within": (
        library(info=stated("sm_80", "9")),
        "as the library states them,",
    ),
    "other source within": (
        manifest(source=SourceRevision("0" * 40, False, "1" * 64)),
        "as the library states them,",
    ),
    "revision that is none": (
        Wheel(replace(described(), source=SourceRevision("main", False, "0" * 64))),
        "expected revision to be the hash of a commit",
    ),
    "dirtiness of nothing": (
        Wheel(replace(described(), source=SourceRevision(None, True, "0" * 64))),
        "expected dirty to be null, found True",
    ),
    "no dirtiness": (
        Wheel(replace(described(), source=SourceRevision("0" * 40, None, "0" * 64))),
        "expected dirty to be true or false, found None",
    ),
    "dirty that the SBOM denies": (
        with_files(**{SBOM: json.dumps(fake_artifacts.sbom_of(described()), indent=1) + "\n"}),
        "expected library",
    ),
    "subset without a label": (
        Wheel(replace(described(), kernels=KERNELS[:2])),
        "expected version with the label of its kernels 0.1.0+attentionfwd",
    ),
    "label of a subset on everything": (
        Wheel(replace(described(), version="0.1.0+hdim64")),
        "version with the label of its kernels 0.1.0, found 0.1.0+hdim64",
    ),
    "other project": (manifest(project="evil"), "expected project flashvar, found evil"),
    "other family": (row(family="sm90"), "expected family ['sm80']"),
    "platform of no wheel": (
        Wheel(replace(described(), platform="linux_aarch64"), fake_artifacts.library(described())),
        "expected platform linux_x86_64, found linux_aarch64",
    ),
    "key twice": (edited(MANIFEST, "{", '{"schema": 2,'), "found 'schema' more than once"),
    "deep": (added(MANIFEST, b"[" * 100_000), "expected JSON, found something else"),
    "not UTF-8": (added(MANIFEST, b'{"schema": "\xff"}'), "expected UTF-8"),
    "huge": (added(MANIFEST, NOISE), "expected at most 1,048,576 bytes"),
    "large number": (added(MANIFEST, b'{"schema": ' + b"9" * 5000 + b"}"), "expected JSON"),
}

OF_KERNELS: Mapping[str, Fault] = {
    "registers": (row(registers=32), "to be 168 as its device code states, found 32"),
    "stack": (row(stack_bytes=64), "to be 0 as its device code states, found 64"),
    "threads": (
        row(threads=256),
        "expected threads of attention_fwd_bf16_hdim32 to be 128 as the kernel facts",
    ),
    "shared memory": (
        row(shared_memory=0),
        "shared memory of attention_fwd_bf16_hdim32 to be 49152",
    ),
    "tile": (row(tile=(64, 64)), "expected tile of attention_fwd_bf16_hdim32 to be (128, 64)"),
    "launches": (
        row(launches=(Launch("evil", "wgmma", "always", (64,), 128, 0),)),
        "expected launches of attention_fwd_bf16_hdim32 to be ()",
    ),
    "spills": (
        row(spill_bytes=8),
        "expected at most 0 bytes of spilled registers in a release, found 8 of attention_fwd_bf16",
    ),
    "spills that another head dim may have": (
        row("gated_delta_rule_fwd_bf16_hdim128", spill_bytes=200, stack_bytes=200),
        "of gated_delta_rule_fwd_bf16_hdim128; choose smaller tiles, or raise "
        "spill_bytes.head_dim.128 of [ops.gated_delta_rule_fwd] in variants.toml",
    ),
    "more threads than it was compiled for": (
        device(first(threads=64), *own()[1:]),
        "expected at most 64 threads in a block",
    ),
    "more stack than stated": (device(first(stack=64), *own()[1:]), "to be 64 as its device code"),
    "more registers than stated": (
        device(first(registers=255), *own()[1:]),
        "to be 255 as its device",
    ),
    "functions swapped between head dims": (
        manifest(kernels=SWAPPED),
        "expected head_dim 32 in the name of a function of attention_fwd_bf16_hdim32, found 128",
    ),
    "functions of another architecture": (
        Wheel(replace(described(), kernels=RENAMED)),
        "for capability 80 and 166912 bytes of shared memory, found 86 and 101376",
    ),
    "function in two rows": (
        row(functions=(*KERNELS[0].functions, *KERNELS[1].functions)),
        "expected an image with the functions of attention_fwd_bf16_hdim32 alone, found other",
    ),
    "more shared memory than a block has": (
        Wheel(
            replace(described(), kernels=(replace(KERNELS[0], shared_memory=200_000), *KERNELS[1:]))
        ),
        "expected at most 166912 bytes of shared memory",
    ),
    "name that is no text": (
        library(kernels=(), more=(Section(".x.kernels", 1, b"\xff" * 300),)),
        "expected UTF-8 text in kernel facts",
    ),
    "records cut short": (
        library(more=(Section(".x.kernels", 1, b"abc"),)),
        "expected kernel facts of 296 bytes",
    ),
}

OF_LIBRARY: Mapping[str, Fault] = {
    "stack of code": (library(segments=EXECUTABLE_STACK), "a stack that is not executable"),
    "no word on the stack": (
        library(segments=tuple(s for s in fake_elf.LOADED if s.kind != 0x6474E551)),
        "a stack that is not executable",
    ),
    "code that is written to": (
        library(segments=WRITABLE),
        "expected no writable and executable segment",
    ),
    "no RELRO": (
        library(segments=tuple(s for s in fake_elf.LOADED if s.kind != 0x6474E552)),
        "expected full RELRO",
    ),
    "lazy": (library(tags=()), "expected full RELRO"),
    "interpreter": (
        library(segments=(*fake_elf.LOADED, Segment(3, 4, ".rodata"))),
        "it names an interpreter",
    ),
    "auxiliary": (library(tags=((30, 8), (0x7FFFFFFD, 1))), "found the tag 0x7ffffffd"),
    "filter": (library(tags=((30, 8), (0x7FFFFFFF, 1))), "found the tag 0x7fffffff"),
    "audit": (library(tags=((30, 8), (0x6FFFFEFC, 1))), "found the tag 0x6ffffefc"),
    "relocated code": (library(tags=((30, 8), (22, 1))), "found the tag 0x16"),
    "other SONAME": (library(soname="libc.so.6"), "expected the SONAME libflashvar_sm80.so"),
    "no SONAME": (library(soname=""), "expected the SONAME libflashvar_sm80.so, found None"),
    "no dynamic segment": (
        library(segments=tuple(s for s in fake_elf.LOADED if s.kind != 2)),
        "expected one dynamic section, at the location of its segment",
    ),
    "dynamic segment elsewhere": (
        library(
            segments=tuple(
                s._replace(section=".rodata") if s.kind == 2 else s for s in fake_elf.LOADED
            )
        ),
        "expected one dynamic section, at the location of its segment",
    ),
    "section twice": (
        library(more=(Section(".dynamic", 1, b""),)),
        "expected one section .dynamic, found 2",
    ),
    "PTX in a section": (
        library(more=(Section(".rodata.x", 1, PTX),)),
        "expected PTX in .nv_fatbin",
    ),
    "device code in a section": (
        library(more=(Section(".x", 1, fake_artifacts.fatbin(own()[0])),)),
        "expected device code in .nv_fatbin alone",
    ),
    "cubin in a section": (
        library(more=(Section(".x", 1, fake_artifacts.cubin({"_Zx": 8})),)),
        "expected a cubin in .nv_fatbin alone",
    ),
    "second section of device code": (
        library(more=(Section("__nv_relfatbin", 1, OTHER),)),
        "1 images without kernels for sm_86",
    ),
    "bytes behind": (
        with_files(**{LIBRARY: Wheel(described()).files()[LIBRARY] + b"x"}),
        "expected zeros outside of sections and headers, found data at byte",
    ),
    "exported data": (
        library(exported_kind=0x11),
        "to be a global function, found another symbol",
    ),
    "program": (elf(16, "<H", 2), "expected a shared library, found an ELF file of type 2"),
    "sections behind the file": (elf(40, "<Q", 1 << 40), "its tables end behind it"),
    "segments behind the file": (elf(32, "<Q", 1 << 63), "its tables end behind it"),
    "no sections": (elf(60, "<H", 0), "0 sections, of which number"),
    "names elsewhere": (elf(62, "<H", 999), "of which number 999 has their names"),
    "small sections": (elf(58, "<H", 8), "8 bytes for a section instead of 64"),
    "32 bits": (elf(4, "<B", 1), "expected a 64-bit little-endian ELF file"),
    "zeroed container": (fatbin(0, "<Q", 0), "expected device code at byte"),
    "container of nothing": (fatbin(6, "<H", 0), "expected device code at byte 0"),
    "container beyond the section": (fatbin(8, "<Q", 1 << 40), "found it cut short"),
    "entry without a header": (fatbin(16 + 4, "<I", 0), "found it cut short"),
    "entry of endless size": (fatbin(16 + 8, "<Q", (1 << 64) - 64), "found it cut short"),
    "entry of another kind": (fatbin(16, "<H", 7), "found an image of kind 7"),
    "entry of another architecture": (
        fatbin(16 + 28, "<I", 86),
        "expected a fatbin entry for 80, as its machine code states, found one for 86",
    ),
    "entry that grows": (
        fatbin(16 + 56, "<Q", 1 << 40),
        "expected at most 4,096 images of device code, of 1,073,741,824 bytes",
    ),
    "entry of another size": (fatbin(16 + 56, "<Q", 100), "expected 100 bytes of device code"),
    "bytes behind an image": (fatbin(16 + 16, "<I", 9), "the rest zeros, found other bytes"),
    "note of another architecture": (
        device(first(code="86"), *own()[1:]),
        "expected a cubin for 86, as its note states, found one for 80 by its flags",
    ),
}

FAULTS = rows(
    metadata=OF_METADATA,
    sbom=OF_SBOM,
    manifest=OF_MANIFEST,
    kernels=OF_KERNELS,
    library=OF_LIBRARY,
)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | Callable[[Path], Path], sentence: str, tmp_path: Path) -> None:
    path = plant.write(tmp_path) if isinstance(plant, Wheel) else plant(tmp_path)
    found = faults(path, expected())
    assert any(sentence in fault for fault in found), found
