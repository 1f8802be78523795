"""The folder that wheels are fetched, judged and packed in; it is gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashvar.errors import InstallError


@contextmanager
def folder() -> Iterator[Path]:
    """A fresh folder of this user alone.

    Raises:
        InstallError: there is no place for it.
    """
    with writing(Path("the temporary folder")):
        made = tempfile.TemporaryDirectory(prefix="flashvar-install-")
    with made as name:
        yield Path(name)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What is written here goes into `path`.

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
