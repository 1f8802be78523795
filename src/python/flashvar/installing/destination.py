"""The folders of this environment that wheels are installed into."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final

from flashvar.errors import InstallError

try:
    import fcntl
except ImportError:  # not Unix, where flashvar has no binaries
    fcntl = None  # type: ignore[assignment]

_MEGABYTE = 1_000_000
# How long one installation may be waited for, in seconds: it downloads, too.
_LIMIT: Final = 600
_POLL: Final = 0.2
_LOCKS: Final = Path("/proc/locks")  # Linux's list of all locks
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

    It is on the folders themselves: no file is added, and it ends with the process. A file system
    that has no locks is used without. If this process dies, an installer that has `lock_files` open
    keeps the lock.

    Raises:
        InstallError: another process has held it for too long.
    """
    with ExitStack() as held:
        # `lib64` may be a link to `lib`; locked twice, a folder would be waited for.
        for folder in dict.fromkeys(map(os.path.realpath, folders())):
            try:
                number = os.open(folder, os.O_RDONLY)
            except OSError:  # `require_writable` says it
                continue
            held.callback(os.close, number)
            _lock(folder, number)
            _held.append(number)
            held.callback(_held.remove, number)
        yield


def lock_files() -> tuple[int, ...]:
    """What a child process needs to have open to keep the lock."""
    return tuple(_held)


def _lock(folder: str, number: int) -> None:
    if not _is_held(number):
        return
    holder, end = _holder(number), time.monotonic() + _LIMIT
    print(f"waiting for {holder} in this environment", flush=True)
    while _is_held(number):
        if time.monotonic() > end:
            raise InstallError(
                f"expected another installation in {folder} to end within {_LIMIT / 60:.0f} "
                f"minutes, found {holder}, or its pip or uv, still there; nothing was installed: "
                "wait until it has ended, or end it"
            )
        time.sleep(_POLL)


def _is_held(number: int) -> bool:
    """Whether another process holds the lock; if not, this one does now, where there are locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # as on NFS, for a folder
        pass
    return False


def _holder(number: int) -> str:
    """Who holds the lock of an open folder, with its process where Linux lists it."""
    name, folder = "another `flashvar install`", os.fstat(number)
    device = f"{os.major(folder.st_dev):02x}:{os.minor(folder.st_dev):02x}"
    held = rf"FLOCK +ADVISORY +WRITE +([1-9]\d*) {device}:{folder.st_ino} "
    found = None
    with suppress(OSError):
        found = re.search(held, _LOCKS.read_text(encoding="ascii"))
    return f"{name} (process {found[1]})" if found else name


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
