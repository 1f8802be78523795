"""The folders of this environment that wheels are installed into."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from flashvar.errors import InstallError

_MEGABYTE = 1_000_000


def folders() -> tuple[Path, ...]:
    """One folder, or two where binary packages have one of their own."""
    found = (Path(sysconfig.get_path(one)) for one in ("purelib", "platlib"))
    return tuple(dict.fromkeys(found))


def require_writable() -> None:
    """Check that files can be added to the folders.

    Raises:
        InstallError: one is missing, or is somebody else's.
    """
    for folder in folders():
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise InstallError(
                f"expected to write into {folder}, found "
                f"{'no permission' if folder.is_dir() else 'no such folder'}: complete the "
                "environment, or make a new one"
            )


def require_room(size: int) -> None:
    """Check that so many bytes can be added; an older version is removed only after that.

    Raises:
        InstallError: the disk has less.
    """
    for folder in folders():
        free = shutil.disk_usage(folder).free
        if free < size:
            raise InstallError(
                f"expected {size / _MEGABYTE:.1f} MB free for {folder}, found "
                f"{free / _MEGABYTE:.1f} MB; nothing was installed: free space"
            )


@contextmanager
def without_remains(names: Iterable[str]) -> Iterator[None]:
    """Where an installation of these files fails, remove the folders that were not there before."""
    tops = {PurePosixPath(name).parts[0] for name in names}
    paths = [folder / top for folder in folders() for top in tops]
    added = [path for path in paths if not path.exists()]
    try:
        yield
    except InstallError:
        for path in added:
            shutil.rmtree(path, ignore_errors=True)
        raise
