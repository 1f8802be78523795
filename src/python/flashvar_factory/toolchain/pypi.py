"""Unpacks wheels of PyPI into folders, for whatever processor."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from flashvar_factory.errors import ToolchainError


def fetch(requirement: str, platform: str, folder: Path) -> None:
    """Unpack a processor's wheel into `folder` at once: it never exists in part."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        fresh = Path(temporary, "fresh")
        command = [sys.executable, *_install(requirement, platform, fresh)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            by_hand = ["python", *_install(requirement, platform, folder)]
            raise ToolchainError(
                f"expected {requirement} for {platform} from PyPI, found: {done.stdout.strip()}\n"
                f"  by hand: {' '.join(by_hand)}"
            )
        publish(fresh, folder)


def publish(fresh: Path, folder: Path) -> None:
    """Rename a complete folder to its final name, unless another build already has."""
    try:
        fresh.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _install(requirement: str, platform: str, folder: Path) -> list[str]:
    # NVIDIA tags its wheels by what is in them: an old glibc will do.
    tags = ["--only-binary=:all:", "--platform", f"manylinux2014_{platform}"]
    command = ["-m", "pip", "install", "--quiet", "--no-deps", *tags]
    return [*command, "--target", str(folder), requirement]
