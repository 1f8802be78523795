"""Faults of a wheel as an archive: its members, their names and modes, its RECORD.

The rows are like those of test_planted.py.
"""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import fake_artifacts
import pytest
from audited import Fault, check_found_at_once, faults, rows
from fake_artifacts import Image, Wheel
from planted import (
    ENTRIES,
    INFO,
    LIBRARY,
    MANIFEST,
    METADATA,
    RECORD,
    SBOM,
    STEM,
    WHEEL,
    Files,
    added,
    at,
    bytes_of,
    called,
    described,
    expected,
    member,
    member_info,
    record,
    without,
    zipped,
)

from flashvar_factory.inspect import archive

pytestmark = pytest.mark.usefixtures("auditwheel")


def bomb(opened: zipfile.ZipFile, files: Files) -> None:
    for name, content in {**files, "bomb": bytes(300_000_000)}.items():
        opened.writestr(member_info(name), content, zipfile.ZIP_DEFLATED)


def with_mode(name: str, mode: int) -> Callable[[zipfile.ZipFile, Files], None]:
    """A member with other permissions; a folder is added."""

    def change(opened: zipfile.ZipFile, files: Files) -> None:
        for key, content in {name: b"", **files}.items():
            info = member_info(key, mode if key == name else 0o100644)
            opened.writestr(info, content, zipfile.ZIP_DEFLATED)

    return change


@pytest.mark.parametrize(
    ("name", "mode"),
    [(LIBRARY, 0o100755), (LIBRARY, 0o100644), (MANIFEST, 0o100664), (f"{STEM}/", 0o040775)],
)
def test_usual_modes_are_no_faults(name: str, mode: int, tmp_path: Path) -> None:
    assert faults(zipped(with_mode(name, mode))(tmp_path), expected()) == []


OTHER = fake_artifacts.fatbin(Image("86", fake_artifacts.cubin({}, 86)))
PTX = b"//\n.version 8.0\n.target sm_80\n.address_size 64\n"

MEMBERS: Mapping[str, Fault] = {
    "path file": (added("evil.pth"), "found this file too"),
    "sitecustomize": (added("sitecustomize.py"), "'sitecustomize.py': expected flashvar_sm80's"),
    "module in the package": (added(f"{STEM}/__init__.py", b""), "found this file too"),
    "foreign package": (added("torch/__init__.py"), "'torch/__init__.py': expected"),
    "console script": (
        added(f"{STEM}-0.1.0.data/scripts/pip"),
        "data/scripts/pip': expected flashvar_sm80's library",
    ),
    "headers": (added(f"{STEM}-0.1.0.data/headers/x.h"), "found this file too"),
    "data that overrides a file": (
        added(f"{STEM}-0.1.0.data/purelib/{MANIFEST}", b"{}"),
        "expected one file of this name, found 2",
    ),
    "signature that is no signature": (
        added(f"{INFO}/RECORD.jws.evil.py"),
        "RECORD.jws.evil.py': expected flashvar_sm80's library",
    ),
    "signature": (added(f"{INFO}/RECORD.jws"), "RECORD.jws': expected flashvar_sm80's"),
    "ptx beside the library": (added(f"{STEM}/k.ptx", PTX), "k.ptx': expected flashvar_sm80's"),
    "cubin beside the library": (
        added(f"{STEM}/k.cubin", fake_artifacts.cubin({"_Zk": 8})),
        "k.cubin': expected flashvar_sm80's",
    ),
    "second dist-info": (added("other-1.0.dist-info/METADATA"), "found this file too"),
    "egg-info": (added(f"{INFO}/top_level.txt"), "found this file too"),
    "direct_url": (added(f"{INFO}/direct_url.json", b"{}"), "found this file too"),
    "second SBOM": (added(f"{INFO}/sboms/other.cdx.json", b"{}"), "found this file too"),
    "license in a folder": (added(f"{INFO}/licenses/a/b"), "found this file too"),
    "license that METADATA does not list": (
        added(f"{INFO}/licenses/OTHER"),
        "expected a License-File for each of ['LICENSE', 'OTHER'], found ['LICENSE']",
    ),
    "no license": (
        without(f"{INFO}/licenses/LICENSE"),
        "expected a License-File for each of [], found ['LICENSE']",
    ),
    "no METADATA": (without(METADATA), "expected METADATA, found none"),
    "no WHEEL": (without(WHEEL), "expected a file WHEEL, found none"),
    "no entry points": (without(ENTRIES), "entry_points.txt: expected this file, found none"),
    "no SBOM": (without(SBOM), "expected an SBOM, found none"),
    "no manifest": (without(MANIFEST), "expected sm_80's manifest, found none"),
    "no library": (without(LIBRARY), f"members: {LIBRARY}: expected this file, found none"),
    "distribution of nobody": (
        called("flashvar_sm81-0.1.0-py3-none-manylinux_2_28_x86_64.whl"),
        "expected a distribution of variants.toml",
    ),
}

ARCHIVE: Mapping[str, Fault] = {
    "dot": (member("./evil"), "a path with empty parts or '.'"),
    "two slashes": (member("a//evil"), "a path with empty parts or '.'"),
    "dots": (member("a/../../evil"), "a path with '..'"),
    "backslash": (member("a\\..\\evil"), "a name that systems read differently"),
    "absolute": (member("/evil"), "an absolute path"),
    "drive": (member("C:evil"), "an absolute path"),
    "stream of a file": (member("a/file.txt:stream"), "a name that systems read differently"),
    "right to left": (member("a\u202efdp.py"), "a name that systems read differently"),
    "control character": (member("a\x07b"), "a name that systems read differently"),
    "end of a line": (member("a\nb"), "a name that systems read differently"),
    "space at the end": (member("a /b"), "a name that systems read differently"),
    "dot at the end": (member("a./b"), "a name that systems read differently"),
    "accent apart": (member("e\u0301.py"), "a name that systems read differently"),
    "another case": (member(MANIFEST.upper()), "expected one file of this name, found 2"),
    "file and folder": (member(STEM), "expected either a file or a folder, found both"),
    "symbolic link": (member("a", stat.S_IFLNK | 0o777), "found a symbolic link"),
    "device": (member("a", stat.S_IFCHR | 0o600), "neither a file nor a folder"),
    "named pipe": (member("a", stat.S_IFIFO | 0o600), "neither a file nor a folder"),
    "set user": (member("a", 0o104755), "the mode -rwsr-xr-x"),
    "set group": (member("a", 0o102755), "the mode -rwxr-sr-x"),
    "written by everyone": (member("a", 0o100666), "the mode -rw-rw-rw-"),
    "run by everyone": (zipped(with_mode(MANIFEST, 0o100755)), "permissions 0644, found 0755"),
    "read by its owner": (zipped(with_mode(MANIFEST, 0o100400)), "permissions 0644, found 0400"),
    "library of its owner": (zipped(with_mode(LIBRARY, 0o100700)), "permissions 0644, found 0700"),
    "folder of its owner": (zipped(with_mode(f"{STEM}/", 0o040700)), "0755, found 0700"),
    "folder with content": (member("a/", 0o040755, b"x"), "a folder with content"),
    "folder": (member("a/", 0o040755), "'a/': expected flashvar_sm80's library"),
    "extra field": (member("a", extra=b"\x55\x54\x00\x00"), "with extra fields, a comment"),
    "comment of a member": (member("a", comment=b"x"), "with extra fields, a comment"),
    "bzip2": (member("a", compress_type=zipfile.ZIP_BZIP2), "compressed by method 12"),
    "LZMA": (member("a", compress_type=zipfile.ZIP_LZMA), "compressed by method 14"),
    "comment of the archive": (
        zipped(lambda opened, files: setattr(opened, "comment", b"x")),
        "no end record at its end",
    ),
    "bytes in front": (bytes_of(lambda content: b"#!/bin/sh\n" + content), "a central directory"),
    "bytes behind": (bytes_of(lambda content: content + b"x"), "no end record at its end"),
    "archive behind": (bytes_of(lambda content: content + content), "a central directory"),
    "encrypted": (bytes_of(at(6, "<H", 1)), "with a local header that differs"),
    "another local name": (bytes_of(at(30, "<B", 65)), "another name in its local header"),
    "another local size": (bytes_of(at(22, "<I", 7)), "with a local header that differs"),
    "another local method": (bytes_of(at(8, "<H", 0)), "with a local header that differs"),
    "count of members": (bytes_of(at(-12, "<H", 3)), "a central directory that is not right"),
    "place of the directory": (bytes_of(at(-6, "<I", 0)), "a central directory that is not right"),
    "bomb": (zipped(bomb), "more than it may grow to"),
    "empty": (bytes_of(lambda content: content[:0] + b"x"), "a file that is too short"),
}

RECORDS: Mapping[str, Fault] = {
    "row twice": (
        record(lambda lines: [*lines, lines[0]]),
        "expected one row in RECORD, found more",
    ),
    "no row": (record(lambda lines: lines[1:]), "expected a row in RECORD, found none"),
    "row of nothing": (record(lambda lines: [*lines, "x,,"]), "expected a file, as RECORD says"),
    "field too long": (
        record(lambda lines: [*lines, "x" * 200_000]),
        "field larger than field limit",
    ),
    "NUL": (record(lambda lines: [*lines, "x\0,,"]), "x\\x00: expected a file, as RECORD says"),
    "open quote": (record(lambda lines: [*lines, '"x']), "unexpected end of data"),
    "two fields": (record(lambda lines: [*lines, "x,"]), "expected three fields in a row, found 2"),
    "weak hash": (
        record(lambda lines: [line.replace("sha256=", "md5=") for line in lines]),
        "expected its SHA-256 in RECORD, found 'md5=",
    ),
    "other hash": (
        record(lambda lines: [line.replace("sha256=", "sha256=x") for line in lines]),
        "the file was changed after the wheel was made",
    ),
    "no hash": (
        record(lambda lines: [f"{line.split(',')[0]},," for line in lines]),
        "expected its SHA-256 in RECORD, found ''",
    ),
    "hash of itself": (
        record(lambda lines: [*lines[:-1], f"{RECORD},sha256=x,1"]),
        "expected a row without hash and size, found ['sha256=x', '1']",
    ),
    "empty": (record(lambda lines: []), "expected a row in RECORD, found none"),
    "not text": (added(f"{INFO}/entry_points.txt", b"\xff\xfe"), "expected UTF-8"),
}
FAULTS = rows(members=MEMBERS, archive=ARCHIVE, record=RECORDS)


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_fault(plant: Wheel | Callable[[Path], Path], sentence: str, tmp_path: Path) -> None:
    check_found_at_once(plant, sentence, tmp_path)


def test_folders_that_auditwheel_adds_are_no_fault(tmp_path: Path) -> None:
    """A repaired wheel has entries for its folders, which RECORD does not list."""
    path = Wheel(described()).write(tmp_path)
    files = archive.read(path)
    folders = {f"{name.rpartition('/')[0]}/" for name in files} | {f"{INFO}/"}
    with zipfile.ZipFile(path, "w") as opened:
        for name in sorted(folders):
            opened.writestr(member_info(name, 0o40755), b"")
        for name, content in files.items():
            opened.writestr(member_info(name), content)
    assert faults(path, expected()) == []
