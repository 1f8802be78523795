"""Whether a binary can serve a request on a device, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flashvar.binaries.manifest import KernelRow
from flashvar.binaries.registry import Binary
from flashvar.binaries.variant import short_axis
from flashvar.machine.system import Device, System
from flashvar.ops import specs
from flashvar.ops.op import OpSpec, Value, spelled
from flashvar.selection.candidates import Rejection
from flashvar.selection.request import Overrides, Request, kind_words


def values_of(spec: OpSpec, row: KernelRow) -> tuple[Value, ...] | None:
    """What a kernel is compiled for, in the order of the op's axes; None where it has others."""
    held = row.values
    if set(held) != {axis.name for axis in spec.axes}:
        return None
    return tuple(axis.value(held[axis.name]) for axis in spec.axes)


def nearest_kernel(request: Request, rows: tuple[KernelRow, ...]) -> KernelRow | None:
    """The cheapest kernel of the request's function and dtype that serves its axes.

    Of equals the first, as the library's own search takes it.
    """
    fitting: list[tuple[int, KernelRow]] = []
    for row in rows:
        if (row.op, row.dtype) != (request.function, request.dtype):
            continue
        held = values_of(request.spec, row)
        if held is None:
            continue
        pairs = list(zip(request.by_axis, held, strict=True))
        if all(axis.serves(have, asked) for (axis, asked), have in pairs):
            cost = sum(sum(have) for _, have in pairs if not isinstance(have, str))
            fitting.append((cost, row))
    return min(fitting, key=lambda one: one[0], default=(0, None))[1]


def rejections(
    request: Request,
    device: Device,
    system: System,
    binary: Binary,
    overrides: Overrides,
    kernel: KernelRow | None,
) -> Iterator[Rejection]:
    """Everything that keeps a binary from serving, the most fundamental first."""
    manifest, architecture, forced = binary.manifest, binary.architecture, overrides.architecture
    if forced is not None and forced != architecture.name:
        yield Rejection(f"FLASHVAR_FORCE_ARCH={forced} was set")
    # Compiling PTX at load takes seconds and ignores the tuning for the device: only on demand.
    translated = (
        forced is not None
        and "ptx" in manifest.code_kinds
        and not architecture.specific
        and device.capability >= architecture.capability
    )
    if not translated and not architecture.runs_on(device.capability):
        exactly = "exactly " if architecture.specific else ""
        yield Rejection(
            f"runs on {exactly}{dotted(architecture.capability)}"
            f"{'' if architecture.specific else ' and higher minors'}, "
            f"the device is {dotted(device.capability)}"
        )
    minimum = manifest.minimum_driver
    if system.driver_cuda is None or system.driver_cuda < minimum.cuda:
        yield Rejection(
            f"needs driver {minimum.display} or newer (CUDA {dotted(minimum.cuda)}), "
            f"found {_driver(system)}",
            f"update the NVIDIA driver to {minimum.display} or newer",
        )
    for axis, asked in request.by_axis:
        if axis.off_step(asked):
            yield Rejection(
                f"expected a {axis.words} in steps of {axis.step}, found {spelled(asked)}"
            )
    missing = dict(binary.missing).get(request.function)
    if missing is not None:
        yield Rejection(missing, binary.candidate.repair)
    if kernel is None:
        yield _no_kernel(request, binary)
        return
    yield from _wasted(request, binary, kernel)
    if kernel.shared_memory > device.shared_memory:
        yield Rejection(
            f"{kernel.name} needs {kernel.shared_memory} bytes of shared memory, "
            f"a block may have {device.shared_memory}"
        )


def _wasted(request: Request, binary: Binary, kernel: KernelRow) -> Iterator[Rejection]:
    held = values_of(request.spec, kernel) or ()
    for (axis, asked), have in zip(request.by_axis, held, strict=True):
        if axis.wasteful(have, asked):
            yield Rejection(
                f"compiled {axis.words} {spelled(have)} would waste more than half of the work",
                _rebuild(request, binary),
            )


def _no_kernel(request: Request, binary: Binary) -> Rejection:
    rows = [row for row in binary.manifest.kernels if row.op == request.function]
    if not rows:
        return Rejection(f"holds no kernel for {request.function}", _complete(request, binary))
    dtypes = sorted({row.dtype for row in rows if row.dtype is not None})
    if dtypes and request.dtype not in dtypes:
        return Rejection(f"holds dtypes {', '.join(dtypes)}, not {request.dtype}")
    held = _kinds(request.spec, (row for row in rows if row.dtype == request.dtype))
    words = kind_words(request.spec.axes, *held)
    asked = request.kind if len(request.axes) > 1 else "".join(map(spelled, request.axes))
    return Rejection(
        f"holds {words or 'other kernels'}, none for {asked}", _rebuild(request, binary)
    )


def _kinds(spec: OpSpec, rows: Iterable[KernelRow]) -> list[tuple[Value, ...]]:
    found = (values_of(spec, row) for row in rows)
    return sorted({values for values in found if values is not None})


def _rebuild(request: Request, binary: Binary) -> str | None:
    """The command that adds what is asked for to a build of a subset, and keeps the rest."""
    if not _is_subset(binary) or any(axis.too_large(asked) for axis, asked in request.by_axis):
        return None
    values: dict[str, set[Value]] = {}
    for spec in specs():
        rows = (row for row in binary.manifest.kernels if row.op in spec.functions)
        kinds = {*_kinds(spec, rows), *([request.axes] if spec is request.spec else [])}
        for place, axis in enumerate(spec.axes):
            values.setdefault(axis.name, set()).update(kind[place] for kind in kinds)
    words = [f"arch={binary.architecture.name}"]
    words += [
        f"{short_axis(name)}={','.join(map(spelled, sorted(held)))}"
        for name, held in values.items()
        if held
    ]
    return f"nox -s build-dev -- {' '.join(words)}"


def _complete(request: Request, binary: Binary) -> str | None:
    """The command that adds the request's function: to a build of a subset, or an older wheel."""
    if _is_subset(binary):
        return _rebuild(request, binary)
    if binary.skew is None:  # the wheel of this very version lacks it
        return None
    return binary.candidate.repair


def _is_subset(binary: Binary) -> bool:
    return "+" in binary.manifest.version


def _driver(system: System) -> str:
    if system.driver_cuda is None:
        return "no NVIDIA driver"
    display = system.driver_display or "a driver"
    return f"{display} (CUDA {dotted(system.driver_cuda)})"


def dotted(version: tuple[int, int]) -> str:
    """A version as people write it."""
    return f"{version[0]}.{version[1]}"
