"""Two ways to begin a launch: start the kernel, or only compile it (warmup)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# Of a kernel and a grid makes what takes the arguments.
Begin = Callable[[Any, "tuple[int, ...]"], Any]


def start(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What takes the arguments of a kernel and starts it on a grid."""
    return kernel[grid]


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What takes the arguments of a kernel and compiles it for them."""
    return partial(kernel.warmup, grid=grid)
