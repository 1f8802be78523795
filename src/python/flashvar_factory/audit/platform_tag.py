"""The systems that a wheel runs on: those its tag promises, and those auditwheel finds."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flashvar_factory.errors import ToolchainError
from flashvar_factory.inspect.archive import Name

Version = tuple[int, int]

_PATIENCE: Final = 300  # seconds; the largest wheels take 20
_LEGACY: Final = {"1": (2, 5), "2010": (2, 12), "2014": (2, 17)}
_TAG = re.compile(r"manylinux(?:_(?P<major>\d+)_(?P<minor>\d+)|(?P<legacy>1|2010|2014))_\w+")
_SYMBOL = re.compile(r"GLIBC_(?P<major>\d{1,4})\.(?P<minor>\d{1,4})(?:\.\d+)?")


@dataclass(frozen=True)
class Policy:
    """auditwheel's answer."""

    tag: str  # the most portable one the wheel may carry; PyPI refuses "linux_x86_64"
    outside: tuple[str, ...]  # libraries that no policy lets a wheel take from the system


def glibc_of_tag(tag: str) -> Version | None:
    """The oldest glibc that a tag promises to run on; None when it promises none."""
    match = _TAG.fullmatch(tag)
    if match is None:
        return None
    if match["legacy"]:
        return _LEGACY[match["legacy"]]
    return int(match["major"]), int(match["minor"])


def glibc_of_symbol(version: str | None) -> Version | None:
    """The glibc that first had a version of a symbol, "GLIBC_2.34"; None for other libraries'."""
    match = _SYMBOL.fullmatch(version or "")
    return (int(match["major"]), int(match["minor"])) if match else None


def ask(wheel: Path, name: Name, brought: frozenset[str] = frozenset()) -> Policy | str:
    """What auditwheel says of a wheel, or why it says nothing.

    Libraries that are `brought` by what the wheel requires count for nothing.

    By its command line, which is its public interface. It unpacks the wheel: only for archives
    that are safe to.
    """
    if importlib.util.find_spec("auditwheel") is None:
        raise ToolchainError(
            "expected auditwheel, which knows the platform tags, found none; "
            "pip install auditwheel zstandard"
        )
    with tempfile.TemporaryDirectory() as folder:
        # It does not know labels of variants.
        plain = Path(folder, f"{name.distribution}-{name.version}-{name.tag}.whl")
        plain.symlink_to(wheel.resolve())
        command = [sys.executable, "-m", "auditwheel", "show", "--json", str(plain)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            return f"none within {_PATIENCE} s"
    if done.returncode != 0:
        return (done.stderr or done.stdout).strip().rpartition("\n")[2]
    answer = json.loads(done.stdout)
    outside = set(answer["external_libs"])
    if outside and outside <= brought and not answer["unsupported_isa"]:
        return Policy(str(answer["sym_tag"]), ())
    return Policy(str(answer["overall_tag"]), tuple(sorted(outside)))
