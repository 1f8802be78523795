"""What `flashvar install` takes for installed already."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fakes
import pytest
from installed import put_binary, put_wheel

from flashvar._version import __version__
from flashvar.cli import install
from flashvar.errors import InstallError
from flashvar.installing import destination, installer, wheel_requirements
from flashvar.installing.wheel_requirements import WheelRequirement
from flashvar.machine.system import platform_tag

MANIFEST = fakes.manifest("89", version=__version__)


@pytest.fixture
def requirement(
    fresh_registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> WheelRequirement:
    """A flashvar with one extra, in an environment with nothing else."""
    line = f"{MANIFEST.distribution}=={__version__}; extra == 'sm89'"
    known = wheel_requirements.read([line], platform_tag())
    monkeypatch.setattr(wheel_requirements, "of_installed", lambda platform: known)
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("FLASHVAR_LIB_DIR", str(tmp_path / "named"))
    return known[0]


@pytest.mark.usefixtures("requirement")
def test_an_installed_binary_behind_a_named_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_wheel(tmp_path / "site", MANIFEST, __version__)
    put_binary(tmp_path / "named", MANIFEST)
    chosen = Namespace(arch="sm89", source=None, dry_run=False)
    assert install.run(chosen) == 0
    expected = f"installed already: flashvar-sm89=={__version__}, for a GPU (8.9)\n"
    assert capsys.readouterr().out == expected


def test_a_named_binary_is_not_what_was_installed(
    requirement: WheelRequirement, tmp_path: Path
) -> None:
    """An installer that put it into another environment is not hidden by it."""
    put_binary(tmp_path / "named", MANIFEST)
    with pytest.raises(InstallError, match="after it was installed, found none"):
        install._check_found([requirement])
    put_wheel(tmp_path / "site", MANIFEST, __version__)
    install._check_found([requirement])


@pytest.mark.usefixtures("requirement")
def test_what_another_process_is_installing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site64").symlink_to("site")
    paths = {"purelib": "site", "platlib": "site64"}
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / paths[name]))
    chosen = Namespace(arch="sm89", source=None, dry_run=False)
    printed = ""
    with ThreadPoolExecutor() as pool:
        with destination.locked():
            run = pool.submit(install.run, chosen)
            while "\n" not in printed and not run.done():
                printed += capsys.readouterr().out
            put_wheel(tmp_path / "site", MANIFEST, __version__)
        assert run.result() == 0
    assert printed.startswith("waiting for another `flashvar install`")
    assert printed.endswith(" in this environment\n")
    assert capsys.readouterr().out.startswith("installed already: ")
    assert [one.name for one in (tmp_path / "site").iterdir() if one.is_file()] == []


def test_another_process_is_waited_for_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(destination, "_LIMIT", 0.3)
    monkeypatch.setattr(destination, "_POLL", 0.1)
    words = r"found another .* or its pip or uv, still there; nothing was installed: wait"
    with destination.locked():
        with pytest.raises(InstallError, match=words), destination.locked():
            pass
        assert capsys.readouterr().out.count("waiting for another") == 1
    with destination.locked():
        pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("lock", "shown"),
    [
        (
            "1: FLOCK  ADVISORY  WRITE 71 {} 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 72 {} 0 EOF",
            " (process 71)",
        ),
        ("1: FLOCK  ADVISORY  WRITE 0 {} 0 EOF", ""),
        ("1: FLOCK  ADVISORY  WRITE 71 {}1 0 EOF", ""),
        ("1: POSIX  ADVISORY  WRITE 71 {} 0 EOF", ""),
        (None, ""),
    ],
    ids=["held", "by-another-container", "another-folder", "another-kind", "no-list"],
)
def test_the_process_that_holds_the_lock_is_named(
    lock: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "_LOCKS", tmp_path / "locks")
    number = os.open(tmp_path, os.O_RDONLY)
    try:
        found = os.fstat(number)
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        if lock is not None:
            (tmp_path / "locks").write_text(lock.replace("{}", place) + "\n", encoding="ascii")
        assert destination._holder(number) == f"another `flashvar install`{shown}"
    finally:
        os.close(number)


def test_a_folder_that_cannot_be_locked_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "missing"))
    with destination.locked():
        pass


def test_a_file_system_without_locks_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some say so at once, some only where a lock has to be waited for."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    for errors in ([errno.EBADF], [errno.EWOULDBLOCK, errno.ENOLCK]):
        raised = iter(errors)

        def lock(number: int, how: int, raised: Iterator[int] = raised) -> None:
            error = next(raised)
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(fcntl, "flock", lock)
        with destination.locked():
            assert list(raised) == []


def test_an_installer_that_outlives_its_process_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-c", f"open({str(tmp_path / 'pipe')!r}).read()"]
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor() as pool:
            with destination.locked():
                run = pool.submit(installer._run, command, os.environ, to_its_end=True)
                pipe = (tmp_path / "pipe").open("w")  # the installer runs
            try:  # what a process has open is closed when it dies
                with pytest.raises(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                pipe.close()
            assert run.result().returncode == 0
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(folder)
