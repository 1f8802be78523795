"""Checks that an environment made by nox is complete: its stamp is written last."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from flashvar_factory.errors import ToolchainError

STAMP: Final = "installed-pins.txt"


def holds(folder: Path, pins: str) -> bool:
    """Whether exactly these pins are installed there, all of them."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == pins


def is_whole(folder: Path) -> bool:
    """Whether an installation there came to its end, whatever its pins were."""
    return (folder / STAMP).is_file() and _python(folder).is_file()


def python(folder: Path, session: str) -> Path:
    """The Python of the environment that `nox -s session` makes; ToolchainError if not whole."""
    if not is_whole(folder):
        found = "an incomplete one" if folder.is_dir() else "none"
        raise ToolchainError(
            f"expected the environment {folder}, found {found}; run `nox -s {session}`"
        )
    return _python(folder)


def remove_unless_whole(folder: Path) -> None:
    """Remove an environment whose installation did not finish."""
    if not is_whole(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"
