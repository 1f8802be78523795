"""The backends: `<backend>/<op>` runs an op, and is imported when it is first chosen.

A backend prepares a launch once per problem, and every call of the problem runs the launch. Thus
`prepare_*` computes everything that depends only on shapes and strides. The protocols of a backend
are in `flashvar.ops.<op>.problem`.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def backend(name: str, op: str) -> ModuleType:
    """The module of a backend ("cuda", "triton" or "reference") that runs an op."""
    return importlib.import_module(f"flashvar.backends.{name}.{op}")
