"""A checkout of git for a test."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit_all(root: Path) -> None:
    """Make a folder a checkout with one commit, which has every file."""
    user = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q", "--template="], ["add", "."], [*user, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
