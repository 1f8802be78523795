"""Damages a binary wheel that `flashvar install` is given."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

from installing_place import VERSION

from flashvar_factory.inspect import archive


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def change_a_member(path: Path) -> None:
    content = path.read_bytes()
    files = archive.read(path)
    record = next(name for name in files if name.endswith("RECORD"))
    name = next(name for name in files if name.endswith(".so"))
    info = record.rpartition("/")[0]
    archive.write(path, {**files, name: b"\x7fELG"}, info)
    assert path.read_bytes() != content


def rewrite(path: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Change members of a wheel; its RECORD is what `change` leaves of it."""
    files = archive.read(path)
    change(files)
    with zipfile.ZipFile(path, "w") as written:
        for name, content in files.items():
            written.writestr(name, content)


def name_a_file_elsewhere(path: Path) -> None:
    """RECORD lists a file of this machine, with its hash."""
    secret = path.parent / "secret.txt"
    secret.write_bytes(b"nobody's business")
    digest = base64.urlsafe_b64encode(hashlib.sha256(secret.read_bytes()).digest()).rstrip(b"=")
    row = f"{secret.resolve()},sha256={digest.decode()},17\n".encode()
    record = f"flashvar_sm89-{VERSION}.dist-info/RECORD"
    rewrite(path, lambda files: files.update({record: row + files[record]}))


def bring_a_stranger(path: Path) -> None:
    """A module of another package, which RECORD does not list."""
    rewrite(path, lambda files: files.update({"torch_extension.py": b"print('here')"}))


def lose_the_entry_point(path: Path) -> None:
    info = f"flashvar_sm89-{VERSION}.dist-info"
    files = archive.read(path)
    del files[f"{info}/entry_points.txt"]
    archive.write(path, files, info)
