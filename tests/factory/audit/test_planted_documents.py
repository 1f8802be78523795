"""Faults in the documents of a wheel: METADATA, WHEEL, entry points, the SBOM, the manifest.

The table goes on from test_planted.py: a row is a fault, how it is planted, and a part
of the sentence that reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_artifacts
import planted
import pytest
from audited import Fault, check_found_at_once, rows
from fake_artifacts import Wheel
from fake_elf import Section
from planted import ENTRIES, INFO, MANIFEST, METADATA, STEM, WHEEL, described, edited, field

from flashvar.binaries.kinds import Kernel
from flashvar.binaries.manifest import MinimumDriver, Toolkit
from flashvar_factory.build import sbom
from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import archive, variant_metadata

pytestmark = pytest.mark.usefixtures("auditwheel")

PLATFORM = "manylinux_2_28_x86_64"
LICENSE = f"{INFO}/licenses/LICENSE"
PARTS = [one["name"] for one in fake_artifacts.sbom_of(described())["components"]]
CUDART, COMPILER = (f"components.{PARTS.index(name)}" for name in ("cudart-static", "GNU-c++"))
ROOT = "metadata.component"


def header(line: str) -> Wheel:
    """The wheel with a line more in METADATA."""
    return edited(METADATA, "Summary:", f"{line}\nSummary:")


def entry(old: str, new: str) -> Wheel:
    return edited(ENTRIES, old, new)


def registers(value: str) -> Wheel:
    """The wheel with another number of registers in its manifest."""
    return edited(MANIFEST, '"registers": 168', f'"registers": {value}')


def dependency(number: int, references: list[str]) -> Wheel:
    """The wheel whose SBOM has other dependencies of a component."""
    return planted.sbom(lambda one: one["dependencies"][number].update(dependsOn=references))


def many_parts(document: Any) -> None:
    document["components"] += [{"name": f"x{i}", "type": "library"} for i in range(20_000)]


def labeled(folder: Path) -> Path:
    """A binary wheel under the name of a variant, with a file that Python runs when it starts."""
    properties = variant_metadata.properties_of(described())
    more = {
        f"{INFO}/variant.json": variant_metadata.document({"sm80": properties}).encode(),
        "evil.pth": b"import os\n",
    }
    return Wheel(described(), more=more, label="-sm80").write(folder)


def renamed(distribution: str) -> planted.Plant:
    """Foreign files under another spelling of the distribution's name."""

    def plant(folder: Path) -> Path:
        info = f"{distribution}-0.1.0.dist-info"
        files = {
            "evil.py": b"",
            f"{info}/METADATA": Wheel(described()).files()[METADATA],
            f"{info}/WHEEL": Wheel(described()).files()[WHEEL],
        }
        path = folder / f"{distribution}-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
        archive.write(path, files, info)
        return path

    return plant


NAMES: Mapping[str, Fault] = {
    "binary under a variant's name": (labeled, "'evil.pth': expected flashvar_sm80's library"),
    "label of a binary": (
        labeled,
        "expected a variant label in the name of the project's own wheel",
    ),
    "platform twice": (
        planted.called(f"{STEM}-0.1.0-py3-none-{PLATFORM}.{PLATFORM}.whl"),
        f"expected the file name {STEM}-0.1.0-py3-none-{PLATFORM}.whl, found another",
    ),
    "name with a dot": (renamed("flashvar.sm80"), "'evil.py': expected flashvar.sm80's library"),
    "name in capitals": (renamed("FlashVar_SM80"), "'evil.py': expected FlashVar_SM80's library"),
}

OF_METADATA: Mapping[str, Fault] = {
    "name again in small letters": (header("name: evil"), "expected valid core metadata"),
    "folded": (header("Requires-Dist:\n evil"), "expected valid core metadata"),
    "import name": (header("Import-Name: torch"), "import-name introduced in metadata version 2.5"),
    "encoding": (header("Content-Transfer-Encoding: base64"), "unrecognized field"),
    "carriage return": (
        header("Keywords: a\rRequires-Dist: evil"),
        "expected requirements [], found ['evil']",
    ),
    "form feed": (
        edited(METADATA, "Summary: ", "Summary: \x0c"),
        "expected text without control characters",
    ),
    "line of an envelope": (
        edited(METADATA, "Metadata-V", "From x\nMetadata-V"),
        "expected only fields, found a mailbox's line first",
    ),
    "newer version": (
        edited(METADATA, "Metadata-Version: 2.4", "Metadata-Version: 2.5"),
        "expected version of the format '2.4', found '2.5'",
    ),
    "older version": (
        edited(METADATA, "Metadata-Version: 2.4", "Metadata-Version: 2.3"),
        "license-expression introduced in metadata version 2.4",
    ),
    "license of another folder": (
        edited(METADATA, "License-File: LICENSE", "License-File: ../LICENSE"),
        "expected valid core metadata",
    ),
    "license twice": (header("License-File: LICENSE"), "found ['LICENSE', 'LICENSE']"),
    "next line": (
        edited(METADATA, "License-File: LICENSE", "License-File: LICENSE\x85License-File: X"),
        "found ['LICENSE', 'X']",
    ),
    "home page": (header("Home-page: https://example.org"), "found ['Home-page']"),
    "maintainer": (
        header("Maintainer: E"),
        "expected repeated or unknown fields [], found ['Maintainer']",
    ),
    "platform": (
        header("Platform: any"),
        "expected repeated or unknown fields [], found ['Platform']",
    ),
    "blanks behind the description": (
        planted.added(METADATA, Wheel(described()).files()[METADATA] + b" " * 900_000),
        "expected description",
    ),
    "separators behind the description": (
        planted.added(METADATA, Wheel(described()).files()[METADATA] + "\x1c\u2028\x85".encode()),
        "expected text without control characters",
    ),
    "empty line in WHEEL": (edited(WHEEL, "Root-Is", "\nRoot-Is"), "found [('', '')"),
    "empty line before the fields": (edited(WHEEL, "Wheel-V", "\nWheel-V"), "found [('', '')"),
    "PTX in a license": (
        planted.added(LICENSE, b"Apache\n.version 9.0\n.target sm_80\n"),
        "expected device code in the library alone, found PTX in this file",
    ),
    "device code in a license": (
        planted.added(LICENSE, b"Apache\n" + fake_artifacts.fatbin(planted.own()[0])),
        "expected device code in the library alone, found device code in this file",
    ),
    "zero byte": (
        edited(METADATA, "# flash", "# \0flash"),
        "expected text without control characters",
    ),
    "80,000 Pythons": (
        edited(METADATA, ">=3.10", ",".join([">=3.10"] * 80_000)),
        "expected Python '>=3.10', found '>=3.10,>=3.10",
    ),
    "deep license": (edited(METADATA, "Apache-2.0", "(" * 100_000), "expected valid core metadata"),
    "long license": (
        edited(METADATA, "Apache-2.0", " AND ".join(["Apache-2.0"] * 60_000)),
        "expected",
    ),
    "deep requirement": (header(f"Requires-Dist: a; {'(' * 100_000}"), "expected valid core"),
    "50,000 requirements": (header("Requires-Dist: a\n" * 50_000 + "Keywords: x"), "expected"),
    "version of 300,000 numbers": (
        edited(METADATA, "\nVersion: 0.1.0", f"\nVersion: {'1.' * 300_000}1"),
        "expected",
    ),
    "tag in small letters": (edited(WHEEL, "Tag:", "tag:"), "('tag', 'py3-none-manylinux"),
    "end of a line": (edited(WHEEL, "1.0\n", "1.0\r\n"), r"('Wheel-Version', '1.0\r')"),
    "folded tag": (edited(WHEEL, "Tag: ", "Tag:\n "), "expected fields"),
    "next line in WHEEL": (edited(WHEEL, "1.1.2", "1.1.2\x85Build: 1"), "expected one Generator"),
    "two spaces": (edited(WHEEL, "lib: false", "lib:  false"), "('Root-Is-Purelib', ' false')"),
    "blanks": (
        edited(MANIFEST, "{", "{" + " " * 100_000),
        "expected the text that the factory writes, found other spaces",
    ),
    "mark of byte order": (edited(WHEEL, "Wheel-V", "\ufeffWheel-V"), r"'\ufeffWheel-Version'"),
    **{
        f"entry point, {name}": (wheel, "by which flashvar finds it")
        for name, wheel in {
            "extra": entry("= flashvar_sm80", "= flashvar_sm80 [evil]"),
            "spaces in the group": entry("[flashvar.binaries]", "[ flashvar.binaries ]"),
            "space behind the group": entry("binaries]", "binaries] "),
            "colon": entry("sm_80 =", "sm_80 :"),
            "comment": entry("sm_80 =", "# x\nsm_80 ="),
            "second line": entry("= flashvar_sm80", "= flashvar_sm80\n  evil"),
            "next line": entry("= flashvar_sm80", "= flashvar_sm80\x85"),
            "separator": entry("= flashvar_sm80", "= flashvar_sm80\x1cx = y"),
            "mark of byte order": entry("[flash", "\ufeff[flash"),
            "capitals": entry("sm_80", "SM_80"),
            "default": entry("[flash", "[DEFAULT]\nx = y\n[flash"),
            "object": entry("= flashvar_sm80", "= flashvar_sm80:main"),
        }.items()
    },
}


def by_clang(folder: Path) -> Path:
    """The wheel whose SBOM says so, of a library that GCC compiled."""
    wheel = planted.library(more=(Section(".comment", 1, b"GCC: (GNU) 12.2.0\0"),))
    text = wheel.files()[planted.SBOM].replace(b"GNU-c++", b"Clang-c++")
    return Wheel(described(), wheel.library, more={planted.SBOM: text}).write(folder)


OF_SBOM: Mapping[str, Fault] = {
    "version that is true": (field("version", True), "expected version of the document '1'"),
    "version that is a fraction": (field("version", 1.0), "expected version of the document '1'"),
    "not a number": (field("version", float("nan")), "NaN, which JSON does not have"),
    "kind of the wheel": (field(f"{ROOT}.type", "application"), "expected kinds ('library'"),
    "kind of the library": (field(f"{ROOT}.components.0.type", "library"), "expected kinds"),
    "schema": (field("$schema", "https://example.org"), "expected schema 'http://cyclonedx.org"),
    "serial number": (field("serialNumber", "x"), "expected serialNumber 'urn:uuid: and a UUID'"),
    "time": (field("metadata.timestamp", "x"), "expected timestamp 'a time in UTC"),
    "time of no day": (
        field("metadata.timestamp", "2026-02-30T00:00:00+00:00"),
        "expected timestamp 'a time in UTC",
    ),
    "nothing in a field": (field(f"{CUDART}.scope", None), "found ['components.scope']"),
    "compiler of another kind": (
        by_clang,
        "expected C++ compiler, as the library's .comment says, ['GNU-c++'], found ['Clang-c++']",
    ),
    "libstdc++ that is left out": (
        planted.library(more=(Section(".data", 1, b"\0N10__cxxabiv119__foreign_exceptionE\0"),)),
        "expected libstdc++, which is in the library, 'listed', found 'not listed'",
    ),
    "time that is a number": (field("metadata.timestamp", 7), "as this factory writes it"),
    "scope": (field(f"{COMPILER}.scope", "required"), "expected description and scope of GNU-c++"),
    "description": (
        field(f"{CUDART}.description", "Buy now"),
        "expected description and scope of cudart-static ('libcudart_static.a, linked",
    ),
    "reference to a part": (field(f"{CUDART}.bom-ref", "x"), "expected bom-ref of cudart-static"),
    "compiler without a version": (
        field(f"{COMPILER}.version", "x\x1b[2J"),
        "expected version of GNU-c++ 'numbers and dots'",
    ),
    "compiler that the library denies": (
        planted.library(more=(Section(".comment", 1, b"GCC: (GNU) 11.1.0\0"),)),
        "expected version of GNU-c++, as the library's .comment says,",
    ),
    "half a letter as a name": (field(f"{CUDART}.name", "\ud800"), "as this factory writes it"),
    "half a letter as a tool": (
        planted.sbom(lambda one: one["components"].append({"name": "\ud800-c++", "version": "1"})),
        r"\ud800",
    ),
    "hash in capitals": (
        field(f"{CUDART}.hashes", [{"alg": "SHA-256", "content": "E" * 64}]),
        "expected hashes of cudart-static 'one SHA-256'",
    ),
    "kind of hash in small letters": (
        field(f"{CUDART}.hashes", [{"alg": "sha-256", "content": "e" * 64}]),
        "expected hashes of cudart-static 'one SHA-256'",
    ),
    "other version in the purl": (
        field(f"{ROOT}.purl", "pkg:pypi/flashvar-sm80@0.1.1"),
        "expected purl",
    ),
    "dirty that is no text": (
        field(f"{ROOT}.properties.0.value", False),
        "expected source",
    ),
    "named license": (
        field(f"{ROOT}.licenses", [{"license": {"name": "Apache-2.0"}}]),
        "expected license",
    ),
    "part twice in a dependency": (
        dependency(-1, ["cudart-static"] * 2),
        "expected dependencies",
    ),
    "part of a tool": (dependency(0, ["evil"]), "expected dependencies"),
    "blanks": (
        planted.added(planted.SBOM, Wheel(described()).files()[planted.SBOM] + b" " * 60_000),
        "expected the text that the factory writes, found other spaces",
    ),
    "20,000 parts": (planted.later(planted.sbom, many_parts), "expected at most 65,536 bytes"),
}

STATED = planted.stated("sm_80", "0.1.0").encode()
MANY_AXES = tuple((f"a{number}", "x") for number in range(490))
OF_MANIFEST: Mapping[str, Fault] = {
    **{
        f"registers, {name}": (registers(value), "expected an integer that is not negative")
        for name, value in {
            "not a number": "NaN",
            "infinite": "Infinity",
            "negative": "-1",
            "true": "true",
            "fraction": "168.0",
            "exponent": "168e0",
            "text": '"168"',
            "nothing": "null",
            "list": "[168]",
        }.items()
    },
    "registers, 4,000 digits": (registers("9" * 4000), "to be 168 as its device code states"),
    "digits of another script": (
        edited(MANIFEST, '"code": "80"', '"code": "\uff18\uff10"'),
        "expected an architecture such as",
    ),
    "text of its build that no code returns": (
        planted.library(info="", more=(Section(".comment", 1, STATED),)),
        "as the library states them, None",
    ),
    "text of its build beside another": (
        planted.library(info='{"architecture":"sm_86"}', more=(Section(".comment", 1, STATED),)),
        "as the library states them, None",
    ),
    "schema that is true": (edited(MANIFEST, '"schema": 2', '"schema": true'), "found true"),
    "key of nobody": (edited(MANIFEST, '"abi": 2', '"abi": 2, "x": 1'), "x: expected no such key"),
    "490 axes": (
        planted.row(axes=MANY_AXES, name=Kernel("attention_fwd", MANY_AXES).name),
        "kernels[0]: expected at most 16 axes, found 490",
    ),
    "axis of nobody": (
        edited(MANIFEST, '"dtype": "bf16"', '"dtype": "bf16", "x": 1'),
        "expected 'attention_fwd_bf16_x1_hdim32', after the function and its axes",
    ),
    "half a letter": (
        edited(MANIFEST, '"version": "0.1.0"', '"version": "0.1.0\\ud800"'),
        "expected a printable string",
    ),
    "right to left": (
        edited(MANIFEST, '"display": "', '"display": "\\u202e'),
        "expected a printable string",
    ),
    "mark of byte order": (edited(MANIFEST, "{", "\ufeff{"), "expected JSON"),
    "compiler without a version, for older drivers": (
        planted.older(toolkit=Toolkit("nvcc", "x", "12.9.86")),
        "expected compiler's version three numbers, found x",
    ),
    "compiler before its ptxas": (
        planted.older(toolkit=Toolkit("nvcc", "11.0.0", "12.9.86")),
        "expected compiler's version 12.9.86 or newer, found 11.0.0",
    ),
    "ptxas where there is none": (
        planted.manifest(toolkit=Toolkit("nvcc", "13.0.88", "13.0.88")),
        "expected ptxas of variants.toml None, found 13.0.88",
    ),
    "driver of another branch": (
        planted.older(minimum_driver=MinimumDriver((12, 0), "550")),
        "expected minimum driver of that toolkit",
    ),
    "distribution for newer drivers": (
        planted.older(distribution="flashvar-sm80"),
        "expected distribution flashvar_sm80_cu12, found flashvar_sm80",
    ),
    "claim to have run, for older drivers": (
        planted.older(ran="own"),
        "expected ran (where its kernels have run, by variants.toml) never, found own",
    ),
}

FAULTS = rows(names=NAMES, metadata=OF_METADATA, sbom=OF_SBOM, manifest=OF_MANIFEST)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | planted.Plant, sentence: str, tmp_path: Path) -> None:
    check_found_at_once(plant, sentence, tmp_path)


def test_a_long_sbom_is_not_validated(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match=f"expected at most {sbom.LIMIT:,} bytes"):
        sbom.read(planted.sbom(many_parts).write(tmp_path))
