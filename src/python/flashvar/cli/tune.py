"""`flashvar tune`: measures tiles of the Triton kernels on this GPU, and stores the best."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashvar import ops
from flashvar.errors import BackendUnavailableError
from flashvar.machine.system import Device, System, gather


@dataclass(frozen=True)
class Tuned:
    """The best tile of one kernel."""

    name: str  # of the kernel, for people
    facts: Mapping[str, Any]  # for --json: the kernel, its axes, and the tile
    tile: str  # in words
    milliseconds: float
    table_milliseconds: float | None  # of the tile in the built-in table; None: it does not run
    measured: int  # how many tiles ran
    kept: str | None  # the file that stores the tile; None: it could not be written


class OpTune(Protocol):
    """The contents of the module `OpSpec.tune` of an op."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that select what is tuned."""
        ...

    def run(
        self,
        chosen: argparse.Namespace,
        system: System,
        device: Device,
        *,
        quiet: bool,
        timer: Any = None,
    ) -> Iterator[Tuned]:
        """Time the tiles of each kernel on the device and keep the best."""
        ...


def tuned_ops() -> dict[str, OpTune]:
    """The modules of the ops whose Triton kernels can be tuned, by op."""
    return ops.modules("tune")


def run(chosen: argparse.Namespace, *, system: System | None = None, timer: Any = None) -> int:
    """Measure tiles, store the best and print them; returns the exit code.

    Raises:
        BackendUnavailableError: the device does not exist, or Triton is not installed.
    """
    system = system or gather()
    device = _device(system, chosen.device)
    op = tuned_ops()[chosen.op]
    results = list(op.run(chosen, system, device, quiet=chosen.json, timer=timer))
    if chosen.json:
        document = {
            "schema": 1,
            "device": device.name,
            "triton": system.triton,
            "kernels": [_to_json(one) for one in results],
        }
        print(json.dumps(document, indent=1))
    else:
        print("\n".join(_summary(results)))
    return 0 if results and all(one.kept for one in results) else 1


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


def _to_json(one: Tuned) -> dict[str, Any]:
    rest = ("milliseconds", "table_milliseconds", "measured", "kept")
    return {**one.facts, **{name: getattr(one, name) for name in rest}}


def _summary(results: Sequence[Tuned]) -> Iterable[str]:
    if not results:
        yield "No tile ran, nothing is kept."
    for one in results:
        line = f"{one.name}: {one.tile}, {one.milliseconds:.3f} ms"
        if one.table_milliseconds is not None:
            line += f", the table's {one.table_milliseconds:.3f} ms"
        yield line
    for file in dict.fromkeys(one.kept for one in results):
        yield f"kept in {file}" if file else "not kept: the cache folder cannot be written"
