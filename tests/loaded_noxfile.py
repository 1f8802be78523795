"""Loads a noxfile as a module, beside sessions of the same names that another test has loaded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import nox.registry


def load(path: Path) -> Any:
    """The module of a noxfile; nox's registry and sys.path are as before."""
    made = importlib.util.spec_from_file_location("loaded_noxfile", path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    with (
        mock.patch.object(nox.registry, "_REGISTRY", {}),
        mock.patch.object(sys, "path", [*sys.path]),
    ):
        made.loader.exec_module(module)
    return module
