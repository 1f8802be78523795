"""Reads sdists: a gzipped tar of regular files in one folder, every size bounded."""

from __future__ import annotations

import io
import stat
import tarfile
import zlib
from pathlib import Path
from typing import Final

from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import zip_file

FILE_BYTES: Final = 1 << 28
MEMBERS: Final = 20_000
TOTAL_BYTES: Final = 1 << 28
RATIO: Final = 100
_SMALL: Final = 1 << 22
_GZIP: Final = 16  # for zlib: with the header of gzip
# Fields of a header that PAX writes once more, for what is long or has fractions.
_FIELDS: Final = frozenset(
    {"path", "linkpath", "size", "uid", "gid", "uname", "gname", "mtime", "atime", "ctime"}
)
_DAMAGED = (OSError, tarfile.TarError, EOFError, ValueError, zlib.error, OverflowError)


def read(path: Path) -> dict[str, bytes]:
    """The files by their names below the folder; PackagingError on anything unusual."""
    try:
        if not path.is_file() or path.stat().st_size > FILE_BYTES:
            raise PackagingError(
                f"{path}: expected an sdist of at most {FILE_BYTES:,} bytes, found none"
            )
        content = path.read_bytes()
    except OSError as error:
        raise PackagingError(f"{path}: expected a readable file, found: {error}") from None
    return parse(content, path)


def parse(content: bytes, path: Path) -> dict[str, bytes]:
    """The same of the bytes of an sdist that came from `path`."""
    try:
        return _files(content, path)
    except _DAMAGED as error:
        raise PackagingError(f"{path}: expected a whole gzipped tar, found: {error}") from None


def _files(packed: bytes, path: Path) -> dict[str, bytes]:
    folder = f"{path.name.removesuffix('.tar.gz')}/"
    limit = min(TOTAL_BYTES, max(_SMALL, RATIO * len(packed)))
    files: dict[str, bytes] = {}
    total = 0
    unpacked = _unpacked(packed, limit)
    with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as opened:
        for member in opened:
            total += member.size
            if total > limit or len(files) >= MEMBERS:
                raise PackagingError(f"{path}: expected at most {limit:,} bytes of files")
            why_not = _why_not(member, folder)
            if member.isdir() and why_not is None:
                continue
            end = member.offset_data + member.size
            if why_not is None and any(unpacked[end : end + -member.size % tarfile.BLOCKSIZE]):
                why_not = "bytes behind its content"
            name = member.name.removeprefix(folder)
            content = opened.extractfile(member) if why_not is None else None
            if content is None or name in files:
                raise PackagingError(
                    f"{path}: expected each file once, below {folder}, found {member.name!r}: "
                    f"{why_not or 'twice'}"
                )
            files[name] = content.read()
        # Where it ends for one reader, others read on.
        if unpacked[opened.offset :].strip(b"\0"):
            raise PackagingError(
                f"{path}: expected zeros after its last file, found others at {opened.offset:,}"
            )
    return files


def _unpacked(packed: bytes, limit: int) -> bytes:
    """The tar of a gzip file: of one member, with nothing behind it, and no larger than `limit`."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | _GZIP)
    content = unpacker.decompress(packed, limit + 1)
    if len(content) > limit:
        raise ValueError(f"more than {limit:,} bytes of files")
    if not unpacker.eof or unpacker.unused_data:
        raise EOFError("a gzip file that is cut short, or has data after it")
    return content


def _why_not(member: tarfile.TarInfo, folder: str) -> str | None:
    if not (member.isreg() or member.isdir()) or member.issparse():
        return "no regular file"
    name, kind = member.name, stat.S_IFREG
    if member.isdir():
        name, kind = f"{name}/", stat.S_IFDIR
    if not name.startswith(folder):
        return "elsewhere"
    strange = sorted(member.pax_headers.keys() - _FIELDS)
    if strange:
        return f"with the attribute {strange[0]}"
    return zip_file.why_not_canonical(
        zip_file.Member(name, kind | member.mode, member.size, 0, 0, memoryview(b""))
    )
