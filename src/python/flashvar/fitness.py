"""Whether a binary can serve a request on a device, and what stands in the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from flashvar.manifest import KernelRow
from flashvar.registry import Binary
from flashvar.system import Device, System
from flashvar.variant import Architecture
from flashvar.verdicts import Overrides, Request

# The kernels read rows in 16-byte pieces, and keep one row of the output in registers.
HEAD_DIM_STEP: Final = 8
HEAD_DIM_MAX: Final = 256
# Up to here a kernel is bound by memory, so a head dim that is compiled larger costs little.
_CHEAP_HEAD_DIM: Final = 64
# Registers are handed to a thread in pieces of this many.
_REGISTER_UNIT: Final = 8


@dataclass(frozen=True)
class Fault:
    """Why a candidate cannot serve."""

    reason: str
    fix: str | None = None


def nearest_kernel(request: Request, rows: tuple[KernelRow, ...]) -> KernelRow | None:
    """The kernel of the request's op and dtype with the smallest head dim that is enough."""
    fitting = [
        row
        for row in rows
        if (row.op, row.dtype) == (request.op, request.dtype)
        and (row.head_dim is None) == (request.head_dim is None)
        and (row.head_dim or 0) >= (request.head_dim or 0)
    ]
    return min(fitting, key=lambda row: row.head_dim or 0, default=None)


def runs(architecture: Architecture, capability: tuple[int, int]) -> bool:
    """Whether SASS of `architecture` loads on a device of `capability`."""
    if architecture.specific:
        return architecture.capability == capability
    return architecture.major == capability[0] and architecture.minor <= capability[1]


def binary_faults(
    request: Request,
    device: Device,
    system: System,
    binary: Binary,
    overrides: Overrides,
    kernel: KernelRow | None,
) -> Iterator[Fault]:
    """Everything that keeps a binary from serving, the most fundamental first."""
    manifest, architecture, forced = binary.manifest, binary.architecture, overrides.architecture
    if forced is not None and forced != architecture.name:
        yield Fault(f"FLASHVAR_FORCE_ARCH={forced} was set")
    # Compiling PTX at load takes seconds and ignores the tuning for the device: only on demand.
    translated = (
        forced is not None
        and "ptx" in manifest.code_kinds
        and not architecture.specific
        and device.capability >= architecture.capability
    )
    if not translated and not runs(architecture, device.capability):
        exactly = "exactly " if architecture.specific else ""
        yield Fault(
            f"runs on {exactly}{dotted(architecture.capability)}"
            f"{'' if architecture.specific else ' and higher minors'}, "
            f"the device is {dotted(device.capability)}"
        )
    minimum = manifest.minimum_driver
    if system.driver_cuda is None or system.driver_cuda < minimum.cuda:
        yield Fault(
            f"needs driver {minimum.display} or newer (CUDA {dotted(minimum.cuda)}), "
            f"found {_driver(system)}",
            f"update the NVIDIA driver to {minimum.display} or newer",
        )
    if request.head_dim is not None and request.head_dim % HEAD_DIM_STEP:
        yield Fault(f"expected a head dim in steps of {HEAD_DIM_STEP}, found {request.head_dim}")
    if kernel is None:
        yield _no_kernel(request, binary)
        return
    compiled, asked = kernel.head_dim or 0, request.head_dim or 0
    if compiled > _CHEAP_HEAD_DIM and compiled > 2 * asked:
        yield Fault(
            f"compiled head dim {compiled} would waste more than half of the work",
            _rebuild(request, binary),
        )
    yield from _launch_faults(kernel, device)


def _launch_faults(kernel: KernelRow, device: Device) -> Iterator[Fault]:
    if kernel.shared_memory > device.shared_memory:
        yield Fault(
            f"{kernel.name} needs {kernel.shared_memory} bytes of shared memory, "
            f"a block may have {device.shared_memory}"
        )
    per_thread = math.ceil(kernel.registers / _REGISTER_UNIT) * _REGISTER_UNIT
    registers = per_thread * kernel.threads
    if registers > device.registers:
        yield Fault(f"{kernel.name} needs {registers} registers, a block has {device.registers}")


def _no_kernel(request: Request, binary: Binary) -> Fault:
    rows = [row for row in binary.manifest.kernels if row.op == request.op]
    if not rows:
        return Fault(f"holds no kernel for {request.op}")
    dtypes = sorted({row.dtype for row in rows if row.dtype is not None})
    if dtypes and request.dtype not in dtypes:
        return Fault(f"holds dtypes {', '.join(dtypes)}, not {request.dtype}")
    dims = sorted({row.head_dim for row in rows if row.head_dim and row.dtype == request.dtype})
    found = ", ".join(map(str, dims))
    return Fault(f"holds head dims {found}, none for {request.head_dim}", _rebuild(request, binary))


def _rebuild(request: Request, binary: Binary) -> str | None:
    """The command that adds the head dim to a build of a subset and keeps the others."""
    if "+" not in binary.manifest.version or (request.head_dim or 0) > HEAD_DIM_MAX:
        return None
    held = {row.head_dim for row in binary.manifest.kernels if row.op == request.op}
    dims = sorted(dim for dim in {*held, request.head_dim} if dim is not None)
    words = ",".join(map(str, dims))
    return f"nox -s build-dev -- arch={binary.architecture.name} hdim={words}"


def _driver(system: System) -> str:
    if system.driver_cuda is None:
        return "no NVIDIA driver"
    display = system.driver_display or "a driver"
    return f"{display} (CUDA {dotted(system.driver_cuda)})"


def dotted(version: tuple[int, int]) -> str:
    """A version as people write it."""
    return f"{version[0]}.{version[1]}"
