"""The temporary folder that wheels are downloaded, checked and packed in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashvar.errors import InstallError


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder that only this user can read; it is removed at the end.

    Raises:
        InstallError: it cannot be made.
    """
    with writing(Path("the temporary folder")):
        made = tempfile.TemporaryDirectory(prefix="flashvar-install-")
    with made as name:
        yield Path(name)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into `path` into a sentence.

    Raises:
        InstallError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InstallError(
            f"expected to write into {path}, found: {error.strerror or error}; nothing was "
            "installed: free space, or name another folder in TMPDIR"
        ) from error
