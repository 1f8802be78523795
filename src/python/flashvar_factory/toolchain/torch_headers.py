"""Finds the torch whose headers and library a library that calls torch is compiled with."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from flashvar_factory.errors import CrossToolchainError, ToolchainError
from flashvar_factory.toolchain.nvcc import Toolchain

_HEADER = "include/torch/headeronly/version.h"
_PART = re.compile(r"^#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)$", re.MULTILINE)


def find(oldest: str, toolchain: Toolchain) -> Path:
    """The folder of the torch of this Python, which is not imported.

    Not a link to it: the compiler follows links, and would write where torch is into libraries.

    Raises:
        ToolchainError: there is none, or an older one than the libraries are for.
        CrossToolchainError: the libraries are for another processor than that torch.
    """
    if toolchain.cross is not None:
        raise CrossToolchainError(
            "expected libraries that call torch to be compiled on their own processor, found "
            f"platform={toolchain.cross.platform}: build them there"
        )
    spec = importlib.util.find_spec("torch")
    folders = [Path(one).resolve() for one in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        header = folder / _HEADER
        if header.is_file():
            found = tuple(map(int, _PART.findall(header.read_text(encoding="utf-8"))))
            if found >= tuple(map(int, oldest.split("."))):
                return folder
            raise ToolchainError(
                f"expected torch {oldest} or newer in {folder}, as [project] of variants.toml "
                f"says, found {'.'.join(map(str, found))}: pip install 'torch>={oldest}'"
            )
    raise ToolchainError(
        f"expected torch {oldest} or newer beside {sys.executable}, whose headers the libraries "
        f"are compiled with, found none: pip install 'torch>={oldest}'"
    )
