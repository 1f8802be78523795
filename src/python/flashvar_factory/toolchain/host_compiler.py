"""Checks that there is a C++ compiler, before CMake runs: its own message is long and late."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from typing import Final

from flashvar_factory.errors import ToolchainError

# The names that CMake looks for, and the folders it searches beside PATH.
_NAMES: Final = ("c++", "CC", "g++", "clang++", "icpx")
_USUAL: Final = ("/usr/local/bin", "/usr/bin", "/bin")


def require(environ: Mapping[str, str]) -> None:
    """ToolchainError where neither CXX nor PATH leads to a C++ compiler."""
    named = environ.get("CXX")
    try:
        names = (shlex.split(named)[:1] or [named]) if named else _NAMES
    except ValueError as error:
        raise ToolchainError(
            f"CXX: expected a C++ compiler and its options, found {named} ({error}): correct CXX"
        ) from error
    path = os.pathsep.join([environ.get("PATH", ""), *_USUAL])
    if any(shutil.which(name, path=path) for name in names):
        return
    found = f"CXX={named}, which is not there" if named else "none on PATH"
    raise ToolchainError(
        f"expected a C++ compiler ({', '.join(_NAMES)}, or what CXX names), found {found}: "
        "apt-get install g++, dnf install gcc-c++ libstdc++-static, or name one in CXX"
    )
