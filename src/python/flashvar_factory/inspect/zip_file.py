"""Reads zip archives strictly: every byte of the file is accounted for, every size is bounded.

`zipfile` finds an archive in whatever lies around it, follows offsets wherever they lead, and takes
the sizes it is given. Two readers that are lenient in other ways see two archives in one file. Here
an archive is local headers with their content, one after the other from the first byte on, then the
central directory that repeats them, then its end record and nothing more.
"""

from __future__ import annotations

import re
import stat
import struct
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date as day_of
from pathlib import Path
from typing import Final

from flashvar_factory.errors import PackagingError

FILE_BYTES: Final = 1 << 30
MEMBERS: Final = 20_000
MEMBER_BYTES: Final = 1 << 29
TOTAL_BYTES: Final = 1 << 30
# Bytes of content for each byte stored; a library or a text has 2 to 10. Small files may have more.
RATIO: Final = 100
_SMALL: Final = 1 << 20
# Bytes that deflated data may have more than their content, beside 1 in 128: every packer has less.
_SLACK: Final = 64

_END = struct.Struct("<4s4H2IH")
# Signature, made by, needed, flags, method, time, date, CRC, stored, size, lengths of name, extra
# and comment, disk, internal and external attributes, offset.
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")  # from "needed" to the length of extra
_STORED, _DEFLATED = 0, 8
_UTF8 = 0x800  # the one flag that may be set
_NEWEST: Final = 45  # the version of the format, times 10, that every reader knows
# Attributes of DOS that a file may have: not a folder's, a volume's or a link's; and a folder's.
_OF_FILES: Final = 0x27
_FOLDER: Final = 0x10
# Names that are devices on Windows, whatever the folder and the suffix.
_DEVICES: Final = re.compile(r"(?:aux|con|nul|prn|(?:com|lpt)[1-9]) *(?:\..*)?", re.IGNORECASE)
# A part of a name and a name as file systems take them, in bytes.
_PART: Final = 255
_LONGEST: Final = 4096


@dataclass(frozen=True)
class Member:
    """One file of an archive."""

    name: str
    mode: int  # of Unix, 0 where the archive has none
    size: int
    method: int
    crc: int
    stored: memoryview

    @property
    def is_folder(self) -> bool:
        """Whether the name is a folder's."""
        return self.name.endswith("/")

    def read(self) -> bytes:
        """The content; PackagingError when it is not what its header states."""
        if self.method == _STORED:
            content = bytes(self.stored)
        else:
            unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
            try:
                content = unpacker.decompress(self.stored, self.size + 1)
            except zlib.error as error:
                raise PackagingError(f"{self.name!r}: expected deflated data: {error}") from None
            if not unpacker.eof or unpacker.unused_data or unpacker.unconsumed_tail:
                raise PackagingError(
                    f"{self.name!r}: expected {self.size:,} bytes of deflated data, found more, "
                    "less, or data behind them"
                )
        if len(content) != self.size or zlib.crc32(content) != self.crc:
            raise PackagingError(
                f"{self.name!r}: expected {self.size:,} bytes with the CRC of their header, found "
                "other content"
            )
        return content


def members(path: Path) -> list[Member]:
    """The members of the archive at `path`, in its order; PackagingError on anything unusual."""
    try:
        size = path.stat().st_size if path.is_file() else -1
        if not 0 <= size <= FILE_BYTES:
            found = "no regular file" if size < 0 else f"{size:,} bytes"
            raise PackagingError(
                f"{path}: expected a file of at most {FILE_BYTES:,} bytes, found {found}"
            )
        content = path.read_bytes()
    except OSError as error:
        raise PackagingError(f"{path}: expected a readable file, found: {error}") from error
    return parse(content, path)


def parse(content: bytes, where: str | Path) -> list[Member]:
    """The members of an archive that came from `where`."""
    try:
        found = list(_members(memoryview(content)))
    except PackagingError as error:
        raise PackagingError(f"{where}: expected a whole zip archive, found {error}") from None
    total = sum(member.size for member in found)
    if total > TOTAL_BYTES or total > max(_SMALL, RATIO * len(content)):
        raise PackagingError(
            f"{where}: expected at most {TOTAL_BYTES:,} bytes of content and {RATIO} times the "
            f"archive's, found {total:,} in {len(content):,}"
        )
    return found


def _members(data: memoryview) -> Iterator[Member]:
    start = len(data) - _END.size
    if start < 0:
        raise PackagingError("a file that is too short")
    magic, disk, first_disk, here, count, size, offset, comment = _END.unpack_from(data, start)
    if magic != b"PK\5\6" or comment:
        raise PackagingError("no end record at its end: it is cut short, or has data after it")
    if (disk, first_disk, here) != (0, 0, count) or offset + size != start:
        raise PackagingError("a central directory that is not right before its end record")
    if count > MEMBERS:
        raise PackagingError(f"{count:,} members, more than {MEMBERS:,}")
    position, content_end = offset, 0
    for _ in range(count):
        member, position, content_end = _member(data, position, start, content_end)
        yield member
    if position != start or content_end != offset:
        raise PackagingError("bytes that belong to no member")


def _member(data: memoryview, position: int, end: int, content_end: int) -> tuple[Member, int, int]:
    """One member, where the next one's central header is, and where its content ends."""
    if position + _CENTRAL.size > end:
        raise PackagingError("a central directory that is cut short")
    row = _CENTRAL.unpack_from(data, position)
    magic, _, needed, flags, method, time, date, crc, stored, size = row[:10]
    name_size, extra_size, comment_size, disk, internal, attributes, offset = row[10:]
    name_end = position + _CENTRAL.size + name_size
    if magic != b"PK\1\2" or name_end > end:
        raise PackagingError("a damaged central directory")
    raw = bytes(data[position + _CENTRAL.size : name_end])
    name = _name(raw, flags)
    if method not in (_STORED, _DEFLATED):
        raise PackagingError(f"{name!r} compressed by method {method}, not stored or deflated")
    if extra_size or comment_size or disk or flags & ~_UTF8:
        raise PackagingError(
            f"{name!r} with extra fields, a comment, encryption or a data descriptor"
        )
    if needed > _NEWEST or internal > 1 or not _is_moment(date, time):
        raise PackagingError(
            f"{name!r} with a header that no reader accepts: version {needed}, date {date:#x}, "
            f"time {time:#x}, internal attributes {internal:#x}"
        )
    usual = _OF_FILES | _FOLDER if name.endswith("/") else _OF_FILES
    if attributes & 0xFFFF & ~usual:
        raise PackagingError(f"{name!r} with the attributes of a folder, a volume or a link")
    if method == _STORED and stored != size:
        raise PackagingError(f"{name!r} stored in {stored:,} bytes, of which there are {size:,}")
    if method == _DEFLATED and stored > size + (size >> 7) + _SLACK:
        raise PackagingError(f"{name!r} of {size:,} bytes deflated to {stored:,}: with other data")
    if size > MEMBER_BYTES or size > max(_SMALL, RATIO * stored):
        raise PackagingError(f"{name!r} of {size:,} bytes in {stored:,}: more than it may grow to")
    if offset != content_end:
        raise PackagingError(f"{name!r} not right behind the member before it")
    start = offset + _LOCAL.size + name_size
    if start + stored > end or bytes(data[offset : offset + 4]) != b"PK\3\4":
        raise PackagingError(f"{name!r} without its local header or its content")
    local = _LOCAL.unpack_from(data, offset)
    if local[1:9] != row[2:10] or local[9:] != (name_size, 0):
        raise PackagingError(f"{name!r} with a local header that differs from the directory's")
    if bytes(data[offset + _LOCAL.size : start]) != raw:
        raise PackagingError(f"{name!r} with another name in its local header")
    # The system that made the archive is ignored: readers differ in whose modes they use.
    member = Member(name, attributes >> 16, size, method, crc, data[start : start + stored])
    return member, name_end, start + stored


def _is_moment(date: int, time: int) -> bool:
    """Whether the two numbers of DOS are a day and a time of it."""
    hour, minute, half = time >> 11, time >> 5 & 63, time & 31
    try:
        day_of(1980 + (date >> 9), date >> 5 & 15, date & 31)
    except ValueError:
        return False
    return hour < 24 and minute < 60 and half < 30


def _name(raw: bytes, flags: int) -> str:
    try:
        return raw.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        raise PackagingError(f"a name that is neither ASCII nor marked as UTF-8: {raw!r}") from None


def why_not_canonical(member: Member) -> str | None:
    """Why a member may be unpacked to another path than its name; None when it cannot."""
    name = member.name.removesuffix("/")
    kind = stat.S_IFMT(member.mode)
    if kind not in (0, stat.S_IFDIR if member.is_folder else stat.S_IFREG):
        return "a symbolic link" if stat.S_ISLNK(member.mode) else "neither a file nor a folder"
    special = stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | stat.S_IWOTH
    if member.mode & special or (member.mode and not member.mode & stat.S_IRUSR):
        return f"the mode {stat.filemode(member.mode)}"
    if member.is_folder and member.size:
        return "a folder with content"
    if name.startswith("/"):
        return "an absolute path"
    if name[1:2] == ":":
        return "an absolute path"
    parts = name.split("/")
    if len(name.encode()) > _LONGEST or any(len(part.encode()) > _PART for part in parts):
        return "a name that is longer than systems take"
    if ".." in parts:
        return "a path with '..'"
    if "" in parts or "." in parts:
        return "a path with empty parts or '.'"
    if any(map(_DEVICES.fullmatch, parts)):
        return "a name that is a device on some systems"
    if not name.isprintable() or any(sign in name for sign in '\\:*?"<>|'):
        return "a name that systems read differently"
    if name != unicodedata.normalize("NFC", name) or any(part[-1] in " ." for part in parts):
        return "a name that systems read differently"
    return None
