"""The folders of this environment that wheels are installed into."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from flashvar.errors import InstallError

try:
    import fcntl
except ImportError:  # not Unix, where flashvar has no binaries
    fcntl = None  # type: ignore[assignment]

_MEGABYTE = 1_000_000
_held: list[int] = []  # the open folders that hold the lock


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


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock of the folders, so that one `flashvar install` at a time changes them.

    It is on the folders themselves: no file is added. A file system that has no locks is used
    without. If this process dies, an installer that has `lock_files` open keeps the lock.
    """
    with ExitStack() as held:
        # `lib64` may be a link to `lib`; locked twice, a folder would be waited for.
        for folder in dict.fromkeys(map(os.path.realpath, folders())):
            try:
                number = os.open(folder, os.O_RDONLY)
            except OSError:  # `require_writable` says it
                continue
            held.callback(os.close, number)
            _lock(number)
            _held.append(number)
            held.callback(_held.remove, number)
        yield


def lock_files() -> tuple[int, ...]:
    """What a child process needs to have open to keep the lock."""
    return tuple(_held)


def _lock(number: int) -> None:
    if fcntl is None:
        return
    with suppress(OSError):  # as on NFS, for a folder
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another `flashvar install` in this environment", flush=True)
            fcntl.flock(number, fcntl.LOCK_EX)


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
