"""`flashvar tune`: measure tiles of the Triton kernels on this GPU, and keep the best."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flashvar.errors import BackendUnavailableError, InvalidInputError
from flashvar.machine.system import Device, System, gather
from flashvar.ops.attention.spec import HEAD_DIM_MAX, HEAD_DIM_STEP

if TYPE_CHECKING:
    from flashvar.backends.triton.attention.measure import Measurement, Timer


def run(
    head_dims: Sequence[int],
    directions: Sequence[str],
    number: int,
    *,
    as_json: bool,
    system: System | None = None,
    timer: Timer | None = None,
) -> int:
    """Measure, keep, and say what was found; returns the exit code.

    Raises:
        InvalidInputError: a head dim that no kernel takes.
        BackendUnavailableError: there is no such device, or no Triton.
    """
    system = system or gather()
    device = _device(system, number)
    for head_dim in head_dims:
        if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= HEAD_DIM_MAX:
            raise InvalidInputError(
                f"a head dim must be a multiple of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}, got "
                f"{head_dim}: "
                "tune the one that your tensors are padded to"
            )
    from flashvar.backends.triton.attention import measure, tiles, tuned

    timer = timer or measure.DeviceTimer(number)
    name = tuned.machine(system.triton, device.name)
    results = []
    for head_dim in dict.fromkeys(head_dims):
        for direction in dict.fromkeys(directions):
            for kernel in measure.KERNELS[direction]:
                say = None if as_json else f"{kernel}, head dim {head_dim}"
                found = _watched(measure.measure(kernel, head_dim, device, timer), say)
                running = [one for one in found if one.milliseconds is not None]
                if not running:
                    continue
                best = min(running, key=lambda one: one.milliseconds or 0.0)
                key = tuned.key(kernel, sum(tiles.split(head_dim)))
                # Kept at once: the next kernel is timed beside it, and an interrupt loses little.
                file = tuned.keep(name, {key: best.tile})
                results.append(_result(best, found, str(file) if file else None))
    if as_json:
        print(json.dumps({"schema": 1, "machine": name, "kernels": results}, indent=1))
    else:
        print("\n".join(_summary(results)))
    return 0 if results and all(one["kept"] for one in results) else 1


def _device(system: System, number: int) -> Device:
    if system.triton is None:
        raise BackendUnavailableError(
            "tuning needs Triton, which is not installed: pip install triton"
        )
    device = system.device(number)
    if device is None:
        raise BackendUnavailableError(
            f"tuning needs a CUDA device, and torch sees no cuda:{number}: "
            "run `flashvar doctor` to see what is there"
        )
    return device


def _watched(found: Iterable[Measurement], what: str | None) -> list[Measurement]:
    """All of them; each is shown as it comes, on stderr, unless `what` is None."""
    measured = []
    for one in found:
        measured.append(one)
        if what is not None:
            time = "does not run" if one.milliseconds is None else f"{one.milliseconds:.3f} ms"
            why = f" ({one.reason.splitlines()[0][:80]})" if one.reason else ""
            print(f"{what}: {_spelled(one.tile)}: {time}{why}", file=sys.stderr, flush=True)
    return measured


def _result(best: Measurement, found: list[Measurement], kept: str | None) -> dict[str, Any]:
    return {
        "kernel": best.direction,
        "head_dim": best.head_dim,
        "tile": list(best.tile),
        "milliseconds": best.milliseconds,
        "table_milliseconds": found[0].milliseconds,  # the table's choice is measured first
        "measured": sum(one.milliseconds is not None for one in found),
        "kept": kept,
    }


def _summary(results: list[dict[str, Any]]) -> Iterable[str]:
    if not results:
        yield "No tile ran, nothing is kept."
    for one in results:
        line = f"{one['kernel']}, head dim {one['head_dim']}: {_spelled(one['tile'])}"
        line += f", {one['milliseconds']:.3f} ms"
        if one["table_milliseconds"] is not None:
            line += f", the table's {one['table_milliseconds']:.3f} ms"
        yield line
    for file in dict.fromkeys(one["kept"] for one in results):
        yield f"kept in {file}" if file else "not kept: the cache folder cannot be written"


def _spelled(tile: Sequence[int]) -> str:
    rows_q, rows_kv, warps, stages = tile
    return f"{rows_q} queries x {rows_kv} keys, {warps} warps, {stages} stages"
