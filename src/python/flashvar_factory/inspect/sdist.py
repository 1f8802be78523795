"""Reads sdists: a gzipped tar of regular files in one folder, every size bounded."""

from __future__ import annotations

import os
import unicodedata
import zlib
from pathlib import Path, PurePosixPath
from typing import Final

from flashvar_factory.errors import PackagingError
from flashvar_factory.inspect import tar_file, zip_file

FILE_BYTES: Final = 1 << 28
MEMBERS: Final = 20_000
TOTAL_BYTES: Final = 1 << 28
RATIO: Final = 100
_SMALL: Final = 1 << 22
_GZIP: Final = 16  # for zlib: with the header of gzip
_FLAGS: Final = 3  # where the header of gzip says what is in it
_NAMED: Final = b"\x08"  # the flag for a name
_HEADER: Final = 10  # bytes before the name
_AGAIN: Final = "build or fetch it again"


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
        return _files(content, path.name.removesuffix(".tar.gz"))
    except (PackagingError, zlib.error) as error:
        raise PackagingError(
            f"{path}: expected a whole gzipped tar, found: {error}; {_AGAIN}"
        ) from None


def _files(packed: bytes, stem: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    seen: dict[str, bool] = {}  # whether it is a folder, by the name that every system sees
    for count, member in enumerate(tar_file.members(_unpacked(packed, stem))):
        if count >= MEMBERS:
            raise PackagingError(f"more than {MEMBERS:,} files and folders")
        name = member.name.removeprefix(f"{stem}/")
        if why_not := _why_not(member, stem):
            raise PackagingError(f"{member.name!r}: {why_not}")
        folded = _folded(name)
        if folded in seen:
            raise PackagingError(f"{member.name!r} twice, as systems see it that fold case")
        seen[folded] = member.is_folder
        if not member.is_folder:
            files[name] = bytes(member.content)
    for name in files:
        for above in PurePosixPath(_folded(name)).parents:
            if not seen.get(str(above), True):
                raise PackagingError(f"{name!r} below another file")
    return files


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _why_not(member: tar_file.Member, stem: str) -> str | None:
    """Why a member does not belong in an sdist; None if it does."""
    name = f"{member.name}/" if member.is_folder else member.name
    if not name.startswith(f"{stem}/"):
        return f"elsewhere than below {stem}/"
    return zip_file.why_not_canonical(
        zip_file.Member(name, member.mode, len(member.content), 0, 0, member.content)
    )


def _unpacked(packed: bytes, stem: str) -> bytes:
    """The tar of a gzip file: of one member, with nothing beside it, of a bounded size."""
    limit = min(TOTAL_BYTES, max(_SMALL, RATIO * len(packed)))
    flags, name = packed[_FLAGS : _FLAGS + 1], os.fsencode(f"{stem}.tar\0")
    if flags != b"\0" and not (flags == _NAMED and packed[_HEADER:].startswith(name)):
        raise PackagingError(f"a header of gzip with more than the name {stem}.tar")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | _GZIP)
    content = unpacker.decompress(packed, limit + 1)
    if len(content) > limit:
        raise PackagingError(f"more than {limit:,} bytes of files")
    if not unpacker.eof or unpacker.unused_data:
        raise PackagingError("a gzip file that is cut short, or has data after it")
    return content
