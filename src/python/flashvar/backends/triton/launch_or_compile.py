"""Two ways to begin a launch: start the kernel, or only compile it (warmup)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# Takes a kernel and a grid, and returns the function that takes the kernel's arguments.
Begin = Callable[[Any, "tuple[int, ...]"], Any]


def start(kernel: Any, grid: tuple[int, ...]) -> Any:
    """Return the function that launches the kernel with its arguments."""
    return kernel[grid]


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
    """Return the function that compiles the kernel for its arguments."""
    return partial(kernel.warmup, grid=grid)
