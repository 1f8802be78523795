"""Faults of an sdist's bytes: what one reader passes over, another one follows.

Each is a tar, or its gzip, that differs from a good one in a header, a record or a gap; the
sentence is a part of what the reader says.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from bounded import bounded

from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import sdist

STEM = "flashvar-1.0"
BLOCK = 512
END = bytes(2 * BLOCK)
FOLDER, PAX, GLOBAL, LONG_NAME, SPARSE = b"5", b"x", b"g", b"L", b"S"
GNU = b"ustar  \0"
NEGATIVE = b"\xff" * 10 + b"\xfe\0"  # as GNU writes numbers that are no octal ones


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def header(name: bytes, size: int = 0, **fields: bytes) -> bytes:
    """A header of ustar, with these fields in place of the usual ones."""
    values = {
        "mode": b"0000644\0",
        "length": b"%011o\0" % size,
        "kind": b"0",
        "magic": b"ustar\x0000",
        "owner": b"",
        "prefix": b"",
        "rest": b"",
        **fields,
    }
    block = struct.pack(
        "<100s8s8s8s12s12s8s1s100s8s32s32s8s8s155s12s",
        name,
        values["mode"],
        b"0000000\0",
        b"0000000\0",
        values["length"],
        b"00000000000\0",
        b" " * 8,
        values["kind"],
        b"",
        values["magic"],
        values["owner"],
        b"",
        b"",
        b"",
        values["prefix"],
        values["rest"],
    )
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def file(name: str, content: bytes = b"", **fields: bytes) -> bytes:
    path = f"{STEM}/{name}".encode()
    return header(path, len(content), **fields) + padded(content)


def record(key: str, value: str) -> bytes:
    text = f" {key}={value}\n".encode()
    size = len(text)
    while len(b"%d" % size) + len(text) != size:
        size += 1
    return b"%d" % size + text


def announced(content: bytes, kind: bytes = PAX) -> bytes:
    """A header whose content is about the next one."""
    return header(b"announced", len(content), kind=kind) + padded(content)


def pax(**values: str) -> bytes:
    """A file with these records of PAX."""
    records = b"".join(record(key.replace("_", "."), value) for key, value in values.items())
    return announced(records) + file("a")


def folders() -> bytes:
    """Very many, made where a test runs: they take as long as many tests."""
    names = (f"{STEM}/{number}".encode() for number in range(30_000))
    many = b"".join(header(name, kind=FOLDER, mode=b"0000755\0") for name in names)
    return many + file("a", os.urandom(200_000))


PATH = record("path", f"{STEM}/p")
MTIME = announced(record("mtime", "1"))
GOOD = file("PKG-INFO", b"text")
# Behind a good file.
MEMBERS: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "3,000 headers of PAX": (MTIME * 3000 + file("a"), "no regular file, of the kind b'x'"),
    "3,000 long names": (
        announced(b"a/b\0", LONG_NAME) * 3000 + file("a"),
        "no regular file, of the kind b'L'",
    ),
    "two headers of PAX": (
        announced(PATH) + MTIME + file("a"),
        "no regular file, of the kind b'x'",
    ),
    "PAX for every file": (announced(PATH, GLOBAL) + file("a"), "of the kind b'g'"),
    "record without an end": (
        announced(b"1" * 3_000_000) + file("a"),
        "a header of PAX of 3,000,000 bytes",
    ),
    "record without a name": (announced(b"1" * 30_000) + file("a"), "of PAX is none"),
    "record of no length": (announced(b"0 path=a\n\n") + file("a"), "of PAX is none"),
    "record that is longer": (announced(b"99 path=a\n") + file("a"), "of PAX is none"),
    "two names": (announced(record("path", "/etc/x") + PATH) + file("a"), "there twice"),
    "another size": (pax(size="600") + bytes(1024), "there twice, or of no regular file"),
    "a link's target": (pax(linkpath="/etc/x"), "there twice, or of no regular file"),
    "no time": (pax(mtime="nan"), "there twice, or of no regular file"),
    "a time of 5,000 digits": (pax(mtime="9" * 5000), "there twice, or of no regular file"),
    "an owner for terminals": (pax(uname="\x1b[31m"), r"with the text '\x1b[31m'"),
    "bytes behind a record": (
        header(b"a", len(PATH), kind=PAX) + PATH.ljust(BLOCK, b"x") + file("a"),
        "bytes behind its content",
    ),
    "PAX behind everything": (announced(PATH), "is not of ustar"),
    "sparse beyond the end": (
        header(b"a", kind=SPARSE, magic=GNU, prefix=bytes(137) + b"\1"),
        "is not of ustar",
    ),
    "sparse in PAX": (pax(GNU_sparse_major="1"), "there twice, or of no regular file"),
    "prefix that GNU ignores": (
        header(b"a", magic=GNU, prefix=STEM.encode()),
        "is not of ustar",
    ),
    "no magic": (file("a", magic=b""), "is not of ustar"),
    "name behind a name": (file("a\0/../../b"), r"with the text 'flashvar-1.0/a\x00/../../b'"),
    "no UTF-8": (header(b"flashvar-1.0/\xff"), "no UTF-8"),
    "owner for terminals": (file("a", owner=b"\x1b[31m"), r"with the text '\x1b[31m'"),
    "rest of a header": (file("a", rest=b"x"), "with other data"),
    "negative size": (file("a", length=NEGATIVE), "with the number"),
    "size that is none": (file("a", length=b"12 34"), "with the number"),
    "mode with a kind": (file("a", mode=b"0120644\0"), "with the mode 120644"),
    "file of a kind of its own": (file("a", kind=b"7"), "of the kind b'7'"),
    "a file as a folder": (
        file("a") + file("a", kind=FOLDER, mode=b"0000755\0"),
        "'flashvar-1.0/a' twice",
    ),
    "a file below a file": (file("a") + file("a/b/c"), "'a/b/c' below another file"),
    "a name in another case": (file("pkg-info"), "'flashvar-1.0/pkg-info' twice"),
    "a name in another form": (file("ss") + file("\u00df"), "'flashvar-1.0/\u00df' twice"),
    "30,000 folders": (folders, "more than 20,000 files and"),
    "content that is cut short": (file("a", b"x", length=b"00000777777\0"), "an end within the"),
}


@pytest.mark.parametrize("fault", MEMBERS)
def test_fault_of_a_member(fault: str) -> None:
    more, sentence = MEMBERS[fault]
    more = more() if callable(more) else more
    assert sentence in refused(gzip.compress(GOOD + more + END))


def refused(content: bytes) -> str:
    with bounded(), pytest.raises(PackagingError) as error:
        sdist.parse(content, Path(f"{STEM}.tar.gz"))
    said = str(error.value)
    assert said.startswith(f"{STEM}.tar.gz: expected a whole gzipped tar, found: ")
    assert said.endswith("build or fetch it again")
    return said


def headed(flags: int, more: bytes) -> bytes:
    """The good sdist with this in the header of gzip."""
    content = gzip.compress(GOOD + END)
    return content[:3] + bytes([flags]) + content[4:10] + more + content[10:]


PACKED: dict[str, tuple[bytes, str]] = {
    "comment": (headed(16, b"x" * 100_000 + b"\0"), "a header of gzip with more than the name"),
    "field": (headed(4, b"\3\0xyz"), "a header of gzip with more than the name"),
    "name elsewhere": (headed(8, b"../../x\0"), "a header of gzip with more than the name"),
    "name and comment": (
        headed(24, f"{STEM}.tar\0x\0".encode()),
        "a header of gzip with more than the name",
    ),
    "second file": (headed(0, b"") * 2, "has data after it"),
    "end that is cut off": (gzip.compress(GOOD), "an end before the header"),
    "half of an end": (gzip.compress(GOOD + bytes(BLOCK)), "no zeros alone after its last file"),
    "tar behind": (gzip.compress((GOOD + END) * 2), "no zeros alone after its last file"),
}


@pytest.mark.parametrize("fault", PACKED)
def test_fault_of_the_gzip_file(fault: str) -> None:
    content, sentence = PACKED[fault]
    assert sentence in refused(content)


@pytest.mark.parametrize("name", ["", f"{STEM}.tar\0"], ids=["no name", "its name"])
def test_nothing_against_a_good_one(name: str) -> None:
    content = headed(8 if name else 0, name.encode())
    assert sdist.parse(content, Path(f"{STEM}.tar.gz")) == {"PKG-INFO": b"text"}


def test_a_long_name_is_read() -> None:
    long = f"{STEM}/{'a' * 120}/b"
    content = gzip.compress(GOOD + announced(record("path", long)) + file("a", b"x") + END)
    found = sdist.parse(content, Path(f"{STEM}.tar.gz"))
    assert found == {"PKG-INFO": b"text", f"{'a' * 120}/b": b"x"}
