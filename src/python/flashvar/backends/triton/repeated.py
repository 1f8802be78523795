"""Launches that are repeated: the compiled kernel is looked up by what differs between launches.

Triton looks it up by every argument of every launch, which takes most of the host time of a small
call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch

from flashvar.ops.plans import Plans

# Triton compiles one kernel for pointers aligned to this many bytes, and another for all others.
_ALIGNMENT: Final = 16
_NO_CONTEXT: Final = nullcontext()


# Takes a kernel, a grid and all arguments except tensors; returns the function that takes tensors.
Bind = Callable[[Any, "tuple[int, ...]", "dict[str, Any]"], Callable[..., object]]


def on_device(device: int | None) -> Any:
    """A context in which a device is the current one, on which Triton launches; None: the CPU."""
    other_device = device is not None and device != torch._C._cuda_getDevice()
    return torch.cuda.device(device) if other_device else _NO_CONTEXT


class RepeatedLaunch:
    """A kernel of `triton.jit` on a grid, with all arguments but the tensors."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """
        Args:
            kernel: Its first parameters are tensors or None.
            grid: Number of programs, of up to three axes.
            arguments: All other parameters by name, and options of the compiler.
        """
        self._kernel, self._grid, self._arguments = kernel, grid, arguments
        self._compiled: dict[tuple[Any, ...], Callable[..., object]] = {}
        self._rest: list[Any] = []
        self._device = 0

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the current device, the same at each call, and its current stream."""
        # For None, which is a constant of the compiled kernel, any pointer will do.
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        dtypes = [None if x is None else x.dtype for x in tensors]
        # All that Triton specializes tensor arguments for; the other arguments do not change.
        key = (*dtypes, *[at % _ALIGNMENT == 0 for at in pointers])
        run = self._compiled.get(key)
        if run is not None:
            run(*pointers, *self._rest, stream=torch._C._cuda_getCurrentRawStream(self._device))
            return
        compiled = self._kernel[self._grid](*tensors, **self._arguments)
        if compiled is None:  # Triton's interpreter
            return
        names = self._kernel.arg_names[len(tensors) :]
        self._rest = [self._arguments[name] for name in names]
        self._device = next(x.get_device() for x in tensors if x is not None)
        self._compiled[key] = compiled[(*self._grid, 1, 1)[:3]]


_launches: Final[Plans[RepeatedLaunch]] = Plans()


def start(kernel: Any, grid: tuple[int, ...]) -> Any:
    """A `Begin`: the function that launches a kernel with its arguments, tensors or None first.

    A launch that differs from an earlier one in its tensors alone is looked up as its repetition.
    """
    return partial(_start, kernel, grid)


def _start(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    count = 0
    for x in given:
        if x is not None and not isinstance(x, torch.Tensor):
            break
        count += 1
    tensors, others = given[:count], given[count:]
    # A kernel is compiled, and handed to the driver, for each device.
    key = (id(kernel), tensors[0].get_device(), grid, others, *named, *named.values())
    launch = _launches.get(key)
    if launch is None:
        names = kernel.arg_names[count:]
        launch = RepeatedLaunch(kernel, grid, {**dict(zip(names, others, strict=False)), **named})
        _launches.keep(key, launch)
    launch(*tensors)
