"""Measures which tile is the fastest on a device: the candidates, and their timing.

A timer takes a kernel, a head dim and a tile and returns milliseconds. It raises if the tile does
not run on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from flashvar.backends.triton.attention import tiles
from flashvar.backends.triton.attention.tiles import Tile

if TYPE_CHECKING:
    from flashvar.machine.system import Device

Timer = Callable[[str, int, Tile], float]

# The kernels of each direction; each has its own tile.
KERNELS: Final = {"forward": ("forward",), "backward": ("backward_q", "backward_kv")}

_ROWS: Final = tuple(1 << power for power in (5, 6, 7))
_STAGES: Final = (1, 2, 3, 4)
# Scores per warp: fewer leave the warp idle, more do not fit in its registers.
_SCORES_PER_WARP: Final = range(256, 4096 + 1)

# The timed call has enough tokens and heads to fill every device.
_TOKENS: Final = 16384
_SEQLEN: Final = 4096
_WIDTH: Final = 2048
_REPEATS: Final = 7


@dataclass(frozen=True)
class Measurement:
    """The time of one tile; None, with the reason, if the tile does not run."""

    direction: str
    head_dim: int
    tile: Tile
    milliseconds: float | None
    reason: str = ""


def candidates(
    direction: str, capability: tuple[int, int], shared_memory: int, head_dim: int
) -> list[Tile]:
    """Tiles that may be fast and fit in `shared_memory` bytes; the choice of the table is first."""
    padded = sum(tiles.split(head_dim))
    first = tiles.choose(direction, capability, shared_memory, head_dim, head_dim)
    every = (Tile(*numbers) for numbers in product(_ROWS, _ROWS, (4, 8), _STAGES))
    fitting = [
        tile
        for tile in every
        if tile != first
        and tile.block_q * tile.block_kv // tile.warps in _SCORES_PER_WARP
        and tiles.shared_bytes(direction, tile, padded, padded, capability) <= shared_memory
    ]
    return [first, *fitting]


def measure(direction: str, head_dim: int, device: Device, timer: Timer) -> Iterator[Measurement]:
    """Time every candidate, one by one."""
    for tile in candidates(direction, device.capability, device.shared_memory, head_dim):
        try:
            milliseconds = timer(direction, head_dim, tile)
        except Exception as error:  # the compiler and the launch may raise anything
            yield Measurement(direction, head_dim, tile, None, f"{type(error).__name__}: {error}")
        else:
            yield Measurement(direction, head_dim, tile, milliseconds)


class DeviceTimer:
    """Times tiles on a CUDA device: the sum of causal and full attention in bfloat16."""

    def __init__(self, device: int) -> None:
        """Time on `cuda:device`."""
        self._device = torch.device("cuda", device)

    def __call__(self, direction: str, head_dim: int, tile: Tile) -> float:
        """The median time; the first call compiles and is not counted."""
        with torch.cuda.device(self._device):
            return sum(
                self._time(self._call(direction, head_dim, tile, causal))
                for causal in (False, True)
            )

    def _call(self, direction: str, head_dim: int, tile: Tile, causal: bool) -> Callable[[], None]:
        from flashvar.backends.triton.attention import launch
        from flashvar.ops.attention.problem import Gradients, Inputs, Options
        from flashvar.ops.attention.validate import inspect, inspect_backward

        shape = (_TOKENS // _SEQLEN, _SEQLEN, max(1, _WIDTH // head_dim), head_dim)
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": self._device}
        q, k, v, grad_out = (torch.randn(shape, **kind) for _ in range(4))
        inputs, options = Inputs(q, k, v), Options(causal=causal, backend="triton")
        problem = inspect(inputs, options)
        out = torch.empty(problem.out_shape, **kind)
        lse = torch.empty(problem.lse_shape, device=self._device)
        if direction == "forward":
            run = launch.forward(problem, tile)
            return lambda: run(inputs, out, lse)
        launch.forward(problem, launch.best_tile(problem, "forward"))(inputs, out, lse)
        # The other backward kernel keeps its tile, so it adds the same time to every candidate.
        chosen = {
            kernel: tile if kernel == direction else launch.best_tile(problem, kernel)
            for kernel in KERNELS["backward"]
        }
        backward = inspect_backward(inputs, options, grad_out, False)
        back = launch.backward(backward, chosen["backward_q"], chosen["backward_kv"])
        grads = Gradients(*(torch.empty_like(one) for one in (q, k, v)))
        return lambda: back(inputs, out, lse, grad_out, None, grads)

    def _time(self, call: Callable[[], None]) -> float:
        call()
        times = []
        for _ in range(_REPEATS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return float(median(times))
