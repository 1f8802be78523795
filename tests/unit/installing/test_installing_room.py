"""`flashvar install` on a full disk: nothing new is left, and the sentence names the disk."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from flashvar.binaries.kinds import Architecture
from flashvar.errors import InstallError
from flashvar.installing import destination, installer
from flashvar.installing.source import WheelSource
from flashvar.installing.wheel_requirements import WheelRequirement

REQUIREMENT = WheelRequirement(Architecture.parse("89"), "flashvar-sm89", "1.2")


FULL = {
    "pip": (
        "ERROR: Exception:\nTraceback (most recent call last):\n  ...\n"
        "OSError: [Errno 28] No space left on device: 'a' -> 'b'",
        "OSError: [Errno 28] No space left on device: 'a' -> 'b'",
    ),
    "uv": (
        "error: Failed to install: a.whl\n  Caused by: failed to copy\n  Caused by: Disk quota "
        "exceeded (os error 122)",
        "Failed to install: a.whl; Disk quota exceeded (os error 122)",
    ),
}


@pytest.mark.parametrize("tool", FULL)
def test_no_room_to_download_is_no_fault_of_the_source(tool: str) -> None:
    printed, words = FULL[tool]
    done = subprocess.CompletedProcess([], 2, "", printed)
    with pytest.raises(InstallError, match="found: " + re.escape(words)) as failed:
        installer._check_fetched(done, REQUIREMENT, WheelSource())
    assert type(failed.value) is InstallError  # and no WheelNotFoundError


def test_a_full_disk_is_seen_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    free = shutil.disk_usage(tmp_path)._replace(free=8_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    destination.require_room(8_000_000)
    with pytest.raises(InstallError, match=r"8\.9 MB free .* found 8\.0 MB; nothing was installed"):
        destination.require_room(8_900_000)


# An installer that writes half of a wheel, and a file that the wheel does not list.
GIVES_UP = """
import pathlib, sys
package = pathlib.Path("flashvar_sm89")
package.mkdir(exist_ok=True)
(package / "half.so").touch()
(package / ".partial").touch()
sys.exit("error: No space left on device")
"""


@pytest.mark.parametrize("was_there", [False, True])
def test_an_installer_that_gives_up_leaves_nothing_new(
    was_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch").mkdir()
    if was_there:
        (tmp_path / "flashvar_sm89").mkdir()
        (tmp_path / "flashvar_sm89" / "manifest.json").touch()
    tool = installer.Pip((sys.executable, "-c", GIVES_UP))
    names = ["flashvar_sm89/half.so", "flashvar_sm89-0.dist-info/RECORD"]
    (tmp_path / "wheels").mkdir()
    with (
        pytest.raises(InstallError, match="found exit code 1"),
        destination.without_remains(names),
    ):
        tool.install([], tmp_path / "wheels")
    assert (tmp_path / "flashvar_sm89" / "manifest.json").exists() is was_there
    assert (tmp_path / "flashvar_sm89").exists() is was_there
    assert (tmp_path / "torch").is_dir()
