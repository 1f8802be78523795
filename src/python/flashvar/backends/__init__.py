"""Who can run an op: `<backend>/<op>/`, imported when it is first chosen.

A backend is asked once per problem to prepare a launch, and the launch is called once per call; so
whatever depends on shapes and strides alone is computed in `prepare_*` and never again. What is
prepared is the op's: `flashvar.ops.<op>.problem` has its protocols.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def backend(name: str, op: str) -> ModuleType:
    """The part of a backend ("cuda", "triton" or "reference") that serves an op."""
    return importlib.import_module(f"flashvar.backends.{name}.{op}")
