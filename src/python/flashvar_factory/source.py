"""What is this built from? Git revision, and a hash of everything that reaches the compiler."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flashvar.manifest import Source

# By convention of a project: its CMake files, and its C++ and CUDA sources.
PARTS: Final = ("CMakeLists.txt", "cmake", "src/cuda")


def gather(root: Path, plan: str) -> Source:
    """Revision and dirtiness of the checkout at `root`, and the hash of its sources and `plan`."""
    revision, dirty = _git(root)
    return Source(revision, dirty, _hash(root, plan))


def _hash(root: Path, plan: str) -> str:
    digest = hashlib.sha256()
    for path in _files(root):
        name = path.relative_to(root).as_posix().encode()
        content = path.read_bytes()
        digest.update(b"%s\0%d\0" % (name, len(content)) + content)
    digest.update(plan.encode())
    return digest.hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for part in PARTS:
        path = root / part
        if path.is_file():
            yield path
        yield from sorted(file for file in path.rglob("*") if file.is_file())


def _git(root: Path) -> tuple[str | None, bool | None]:
    """Commit and whether the tree differs from it; None for both outside a checkout of its own."""
    try:
        top = _run(root, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != root.resolve():
            return None, None
        return _run(root, "rev-parse", "HEAD"), bool(_run(root, "status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _run(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
