"""`flashvar tune` for attention: measures the tiles of the Triton kernels for each head dim."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from flashvar.cli.comma_lists import numbers, unique
from flashvar.cli.tune import Tuned
from flashvar.errors import ConfigurationError
from flashvar.ops.attention.spec import HEAD_DIM_MAX, HEAD_DIM_STEP

if TYPE_CHECKING:
    from flashvar.backends.triton.attention.measure import Measurement
    from flashvar.machine.system import Device, System

_DIRECTIONS: Final = ("forward", "backward")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select what is tuned."""
    parser.add_argument(
        "--head-dim",
        type=numbers,
        nargs="+",
        default=[[64, 128]],
        metavar="N",
        help=f"{HEAD_DIM_STEP} to {HEAD_DIM_MAX}, in steps of {HEAD_DIM_STEP} (default: 64,128)",
    )
    parser.add_argument(
        "--direction",
        nargs="+",
        choices=_DIRECTIONS,
        default=list(_DIRECTIONS),
        metavar="D",
        help="forward, backward (default: both)",
    )


def run(
    chosen: argparse.Namespace, system: System, device: Device, *, quiet: bool, timer: Any = None
) -> Iterator[Tuned]:
    """Time the tiles of each kernel on the device and keep the best.

    Raises:
        ConfigurationError: no kernel supports the head dim.
    """
    head_dims = unique(chosen.head_dim)
    for head_dim in head_dims:
        if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= HEAD_DIM_MAX:
            raise ConfigurationError(
                f"a head dim must be a multiple of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}, found "
                f"{head_dim}: tune the padded head dim"
            )
    from flashvar.backends.triton.attention import measure, tiles, tuned

    timer = timer or measure.DeviceTimer(device.index)
    machine = tuned.machine(system.triton, device.name)
    for head_dim in head_dims:
        for direction in dict.fromkeys(chosen.direction):
            for kernel in measure.KERNELS[direction]:
                name = f"{kernel}, head dim {head_dim}"
                found = _with_progress(
                    measure.measure(kernel, head_dim, device, timer), name, quiet
                )
                running = [one for one in found if one.milliseconds is not None]
                if not running:
                    continue
                best = min(running, key=lambda one: one.milliseconds or 0.0)
                key = tuned.key(kernel, sum(tiles.split(head_dim)))
                # Written at once: the kernels timed next use the tile, and an interrupt loses
                # little.
                file = tuned.keep(machine, {key: best.tile})
                yield Tuned(
                    name,
                    {"kernel": kernel, "head_dim": head_dim, "tile": list(best.tile)},
                    _tile_text(best.tile),
                    best.milliseconds or 0.0,
                    found[0].milliseconds,  # the table's choice is measured first
                    len(running),
                    str(file) if file else None,
                )


def _with_progress(found: Iterable[Measurement], name: str, quiet: bool) -> list[Measurement]:
    """All measurements; prints each on stderr as it arrives, unless `quiet`."""
    measured = []
    for one in found:
        measured.append(one)
        if not quiet:
            time = "does not run" if one.milliseconds is None else f"{one.milliseconds:.3f} ms"
            why = f" ({one.reason.splitlines()[0][:80]})" if one.reason else ""
            print(f"{name}: {_tile_text(one.tile)}: {time}{why}", file=sys.stderr, flush=True)
    return measured


def _tile_text(tile: Sequence[int]) -> str:
    rows_q, rows_kv, warps, stages = tile
    return f"{rows_q} queries x {rows_kv} keys, {warps} warps, {stages} stages"
