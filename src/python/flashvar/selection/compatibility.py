"""Whether a binary can serve a request on a device, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from flashvar.binaries.manifest import KernelRow
from flashvar.binaries.registry import Binary
from flashvar.binaries.variant import pair_words
from flashvar.machine.system import Device, System
from flashvar.selection.request import Overrides, Request

# The kernels read rows in 16-byte pieces, and keep one row of the output in registers.
HEAD_DIM_STEP: Final = 8
HEAD_DIM_MAX: Final = 256
# Up to here a kernel is bound by memory, so a head dim that is compiled larger costs little.
_CHEAP_HEAD_DIM: Final = 64


@dataclass(frozen=True)
class Fault:
    """Why a candidate cannot serve."""

    reason: str
    fix: str | None = None


def nearest_kernel(request: Request, rows: tuple[KernelRow, ...]) -> KernelRow | None:
    """The cheapest kernel of the request's op and dtype whose head dims are enough.

    Of equals the first, as the library's own search takes it.
    """
    fitting = [
        row
        for row in rows
        if (row.op, row.dtype) == (request.op, request.dtype)
        and (row.head_dim is None) == (request.head_dim is None)
        and all(held >= asked for held, asked in zip(row.dims, request.dims, strict=True))
    ]
    return min(fitting, key=lambda row: sum(row.dims), default=None)


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
    if not translated and not architecture.runs_on(device.capability):
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
    if any(dim % HEAD_DIM_STEP for dim in request.dims):
        yield Fault(f"expected a head dim in steps of {HEAD_DIM_STEP}, found {request.dim_words}")
    if kernel is None:
        yield _no_kernel(request, binary)
        return
    # The larger head dim counts: a call with two runs in the size that holds both.
    if max(kernel.dims) > _CHEAP_HEAD_DIM and max(kernel.dims) > 2 * max(request.dims):
        yield Fault(
            f"compiled head dim {kernel.dim_words} would waste more than half of the work",
            _rebuild(request, binary),
        )
    yield from _launch_faults(kernel, device)


def _launch_faults(kernel: KernelRow, device: Device) -> Iterator[Fault]:
    if kernel.shared_memory > device.shared_memory:
        yield Fault(
            f"{kernel.name} needs {kernel.shared_memory} bytes of shared memory, "
            f"a block may have {device.shared_memory}"
        )


def _no_kernel(request: Request, binary: Binary) -> Fault:
    rows = [row for row in binary.manifest.kernels if row.op == request.op]
    if not rows:
        return Fault(f"holds no kernel for {request.op}", _complete(request, binary))
    dtypes = sorted({row.dtype for row in rows if row.dtype is not None})
    if dtypes and request.dtype not in dtypes:
        return Fault(f"holds dtypes {', '.join(dtypes)}, not {request.dtype}")
    mine = [row for row in rows if row.dtype == request.dtype]
    found = ", ".join(dim_words(row.dims for row in mine))
    reason = f"holds head dims {found}, none for {request.dim_words}"
    return Fault(reason, _rebuild(request, binary))


def dim_words(dims: Iterable[tuple[int, int]]) -> list[str]:
    """Head dims as people and commands write them, each once, in order: 64, 128, 192x128."""
    return [pair_words(*one) for one in sorted(set(dims)) if any(one)]


def _rebuild(request: Request, binary: Binary) -> str | None:
    """The command that adds the head dim to a build of a subset and keeps the others."""
    if not _is_subset(binary) or max(request.dims) > HEAD_DIM_MAX:
        return None
    return _build(binary, (*(row.dims for row in binary.manifest.kernels), request.dims))


def _complete(request: Request, binary: Binary) -> str | None:
    """The command that adds the request's op: to a build of a subset, or to an older wheel."""
    if _is_subset(binary):
        return _rebuild(request, binary)
    if binary.skew is None:  # the wheel of this very version lacks it
        return None
    return binary.candidate.repair


def _is_subset(binary: Binary) -> bool:
    return "+" in binary.manifest.version


def _build(binary: Binary, dims: Iterable[tuple[int, int]]) -> str:
    words = f"arch={binary.architecture.name} hdim={','.join(dim_words(dims))}"
    return f"nox -s build-dev -- {words}"


def _driver(system: System) -> str:
    if system.driver_cuda is None:
        return "no NVIDIA driver"
    display = system.driver_display or "a driver"
    return f"{display} (CUDA {dotted(system.driver_cuda)})"


def dotted(version: tuple[int, int]) -> str:
    """A version as people write it."""
    return f"{version[0]}.{version[1]}"
