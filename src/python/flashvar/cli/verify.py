"""The calls that `doctor --verify` checks, and the line that it prints.

`OpSpec.verify` names the module with the calls of an op. A result is compared with that of the
reference for the same inputs in float64: the largest difference, in units of the root mean square
of the reference and of the dtype's rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from flashvar import ops
from flashvar._version import __version__
from flashvar.binaries.kinds import dotted
from flashvar.binaries.registry import Inventory
from flashvar.machine.system import Device, System
from flashvar.ops.op import Value

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
SECONDS: Final = 60.0


@dataclass(frozen=True)
class Case:
    """One call, with its inputs on the CPU in the dtypes of the call."""

    name: str  # for people, e.g. "packed bf16 64"
    inputs: Tensors
    call: Callable[[Tensors], tuple[torch.Tensor, ...]]
    leaves: tuple[str, ...] = ()  # the inputs that are differentiated
    roundings: float = 16.0  # that a result may differ by; a gradient twice as many


class OpVerify(Protocol):
    """The contents of the module `OpSpec.verify` of an op."""

    def cases(
        self, dtype: torch.dtype, axes: tuple[Value, ...], random: torch.Generator
    ) -> Iterable[Case]:
        """The calls of one kind, the most usual first."""
        ...


@dataclass(frozen=True)
class Checked:
    """The outcome of one call."""

    op: str
    case: str
    candidate: str  # what ran it
    ratio: float  # the largest difference, as a part of what is allowed
    worst: str  # the result that differs most
    failure: str | None = None  # the error of a call that raised

    @property
    def passed(self) -> bool:
        """Whether every result is near the reference's."""
        return self.failure is None and self.ratio <= 1.0  # not of a NaN


@dataclass(frozen=True)
class Verification:
    """All outcomes on one device."""

    device: Device
    checked: tuple[Checked, ...]
    left: int = 0  # calls that there was no time for
    unchecked: tuple[str, ...] = ()  # ops of which no call was checked

    @property
    def passed(self) -> bool:
        """Whether calls were made, and all of them are right."""
        return bool(self.checked) and all(one.passed for one in self.checked)


def verified_ops() -> dict[str, OpVerify]:
    """The modules of all ops that have one, by op."""
    return ops.modules("verify")


def line(found: Verification, system: System, inventory: Inventory) -> str:
    """The outcome and what it is of, to be pasted into an issue."""
    device = found.device
    wrong = [one for one in found.checked if not one.passed]
    outcome = "passed" if found.passed else f"FAILED {len(wrong)}" if wrong else "FAILED"
    candidates = dict.fromkeys(one.candidate for one in found.checked)
    by = ", ".join(_described(name, inventory) for name in candidates) or "nothing"
    names = ", ".join(dict.fromkeys(one.op for one in found.checked)) or "no op"
    parts = [
        f"flashvar verify: {outcome}: {len(found.checked)} calls of {names} by {by}",
        *([f"{found.left} calls left out after {SECONDS:.0f} s"] if found.left else []),
        *([f"not checked: {', '.join(found.unchecked)}"] if found.unchecked else []),
        *map(_failure, wrong[:3]),
        *([] if wrong or not found.checked else [_nearest(found.checked)]),
        f"flashvar {__version__}",
        f"{device.name} ({dotted(device.capability)}), {device.memory / 2**30:.0f} GiB",
        f"driver {system.driver_display or '?'}, CUDA {dotted(system.driver_cuda or (0, 0))}",
        f"torch {system.torch}, triton {system.triton}, {system.platform}",
    ]
    return "; ".join(parts)


def _described(candidate: str, inventory: Inventory) -> str:
    """A candidate; of a binary also its version and commit."""
    for binary in inventory.binaries:
        if candidate == f"cuda {binary.kind.name}":
            commit = (binary.manifest.source.revision or "no commit")[:12]
            return f"{candidate} ({binary.manifest.version}, {commit})"
    return candidate


def _failure(one: Checked) -> str:
    if one.failure is not None:
        return f"{one.op} {one.case} by {one.candidate} raised {one.failure}"
    return f"{one.op} {one.case} by {one.candidate}: {one.worst} is {one.ratio:.3g} x the limit off"


def _nearest(checked: Iterable[Checked]) -> str:
    one = max(checked, key=lambda one: one.ratio)
    return f"at most {one.ratio:.2f} of the limit ({one.op} {one.case}: {one.worst})"
