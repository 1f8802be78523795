"""Reads tar archives strictly: every byte is accounted for, as Python's writer leaves them.

`tarfile` recurses into headers of headers, takes the last of several names, and passes over what it
does not know; other readers take the first name, or none. Here a member is at most one header of
PAX, a header of ustar, and its content; what no reader needs is zeros.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from flashvar_factory.errors import PackagingError

_BLOCK: Final = 512
# Bytes of a header of PAX, which holds a name and a few numbers.
_HEADER_BYTES: Final = 1 << 16
_MAGIC: Final = b"ustar\x0000"
_NUMBER: Final = re.compile(rb"[0-7]{1,11}[ \0]*|\0+")
_RECORD: Final = re.compile(rb"([1-9][0-9]{0,4}) ([A-Za-z.]+)=([^\n]*)\n")
_SECONDS: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
# What PAX writes once more, for what is long or has fractions; a size is never so large.
_TIMES: Final = frozenset({"mtime", "atime", "ctime"})
_IDS: Final = frozenset({"uid", "gid"})
_TEXTS: Final = frozenset({"path", "uname", "gname"})
_FILE, _FOLDER, _PAX = b"0", b"5", b"x"


class Member(NamedTuple):
    """One file or folder of an archive."""

    name: str
    mode: int  # of Unix, with the kind
    content: memoryview

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self.mode)


class _Header(NamedTuple):
    name: str
    mode: int
    size: int
    kind: bytes


def members(content: bytes) -> Iterator[Member]:
    """The files and folders in their order; PackagingError on anything unusual."""
    data, position = memoryview(content), 0
    while (block := _block(data, position)).strip(b"\0"):
        header, position = _header(block, position), position + _BLOCK
        more: dict[str, str] = {}
        if header.kind == _PAX:
            if header.size > _HEADER_BYTES:
                raise PackagingError(
                    f"a header of PAX of {header.size:,} bytes, more than {_HEADER_BYTES:,}"
                )
            records, position = _content(data, position, header.size)
            more = _attributes(bytes(records))
            header, position = _header(_block(data, position), position), position + _BLOCK
        name = more.get("path", header.name)
        if header.kind not in (_FILE, _FOLDER):
            raise PackagingError(f"{name!r}: no regular file, of the kind {header.kind!r}")
        packed, position = _content(data, position, header.size)
        kind = stat.S_IFDIR if header.kind == _FOLDER else stat.S_IFREG
        if header.kind == _FOLDER:
            name = name.removesuffix("/")
        yield Member(name, kind | header.mode, packed)
    # Where it ends for one reader, others read on.
    if bytes(data[position:]).strip(b"\0") or len(data) < position + 2 * _BLOCK:
        raise PackagingError(f"no zeros alone after its last file, from byte {position:,} on")


def _block(data: memoryview, position: int) -> bytes:
    if position + _BLOCK > len(data):
        raise PackagingError(f"an end before the header at byte {position:,}")
    return bytes(data[position : position + _BLOCK])


def _content(data: memoryview, position: int, size: int) -> tuple[memoryview, int]:
    """What a header announces, and where the next header is."""
    end = position + size
    following = end + -size % _BLOCK
    if following > len(data):
        raise PackagingError(f"an end within the {size:,} bytes at byte {position:,}")
    if any(data[end:following]):
        raise PackagingError(f"bytes behind its content, at byte {end:,}")
    return data[position:end], following


def _header(block: bytes, position: int) -> _Header:
    where = f"the header at byte {position:,}"
    if block[257:265] != _MAGIC:
        raise PackagingError(f"{where} is not of ustar, as Python writes it")
    # A name, mode, owner, group, size, time, checksum, kind, link, owner, group, device, prefix.
    if sum(block[:148] + b" " * 8 + block[156:]) != _number(block[148:156], where):
        raise PackagingError(f"{where} with a wrong checksum")
    for start, end in ((108, 116), (116, 124), (136, 148), (329, 337), (337, 345)):
        _number(block[start:end], where)
    if _text(block[157:257], where) or block[500:].strip(b"\0"):
        raise PackagingError(f"{where}: no regular file, but a link, or with other data")
    for start in (265, 297):
        _text(block[start : start + 32], where)
    name, prefix = _text(block[:100], where), _text(block[345:500], where)
    mode = _number(block[100:108], where)
    if mode > 0o7777:
        raise PackagingError(f"{where} with the mode {mode:o}")
    return _Header(
        f"{prefix}/{name}" if prefix else name,
        mode,
        _number(block[124:136], where),
        block[156:157],
    )


def _number(field: bytes, where: str) -> int:
    if not _NUMBER.fullmatch(field):
        raise PackagingError(f"{where} with the number {field!r}")
    return int(field.strip(b" \0") or b"0", 8)


def _text(field: bytes, where: str) -> str:
    """The text of a field, behind which are zeros."""
    found = field.rstrip(b"\0")
    try:
        text = found.decode("utf-8")
    except UnicodeDecodeError:
        raise PackagingError(f"{where} with the text {found!r}, no UTF-8") from None
    if not text.isprintable():
        raise PackagingError(f"{where} with the text {text!r}")
    return text


def _attributes(records: bytes) -> dict[str, str]:
    """The records of a header of PAX, each once: what Python's writer leaves of a file."""
    found: dict[str, str] = {}
    position = 0
    while position < len(records):
        where = f"the record {records[position : position + 40]!r} of PAX"
        match = _RECORD.match(records, position)
        if match is None or int(match[1]) != len(match[0]):
            raise PackagingError(f"{where} is none")
        key, value = match[2].decode(), _text(match[3], where)
        usual = (
            key in _TEXTS
            or (key in _TIMES and _SECONDS.fullmatch(value))
            or (key in _IDS and value.isdecimal())
        )
        if not usual or key in found:
            raise PackagingError(f"{where}: there twice, or of no regular file")
        found[key] = value
        position = match.end()
    return found
