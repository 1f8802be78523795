"""Compatibility of a binary with a request on a device: rejection reasons and their fixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flashvar.binaries import install_commands
from flashvar.binaries.kinds import Architecture, dotted, short_axis
from flashvar.binaries.manifest import KernelRow, MinimumDriver
from flashvar.binaries.registry import Binary
from flashvar.machine.system import Device, System
from flashvar.ops import specs
from flashvar.ops.op import OpSpec, Value, value_text
from flashvar.selection.candidates import Rejection
from flashvar.selection.request import Overrides, Request, kind_text


def values_of(spec: OpSpec, row: KernelRow) -> tuple[Value, ...] | None:
    """A kernel's axis values, in the order of the op's axes; None if the kernel has other axes."""
    held = row.values
    if set(held) != {axis.name for axis in spec.axes}:
        return None
    if not all(axis.takes(held[axis.name]) for axis in spec.axes):
        return None
    return tuple(axis.value(held[axis.name]) for axis in spec.axes)


def nearest_kernel(request: Request, rows: tuple[KernelRow, ...]) -> KernelRow | None:
    """The cheapest kernel of the request's function and dtype that fits its axes.

    Of equally cheap kernels the first, as in the library's own search.
    """
    fitting: list[tuple[int, KernelRow]] = []
    for row in rows:
        if row.function != request.function or row.dtype != request.dtype:
            continue
        held = values_of(request.spec, row)
        if held is None:
            continue
        pairs = list(zip(request.by_axis, held, strict=True))
        if all(axis.fits(have, asked) for (axis, asked), have in pairs):
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
    """The reasons why a binary cannot run a request, the most fundamental first."""
    manifest, architecture, forced = binary.manifest, binary.architecture, overrides.kind
    if forced is not None and forced not in (architecture.name, binary.kind.name):
        yield Rejection(f"FLASHVAR_FORCE_ARCH={forced} was set")
    # The driver compiles PTX for seconds at load, and tiles are not tuned for the device: only if
    # the user forces the architecture.
    translated = (
        forced is not None
        and "ptx" in manifest.code_kinds
        and not architecture.specific
        and device.capability >= architecture.capability
    )
    runs = architecture.runs_on(device.capability)
    if device.tegra:
        runs = architecture.capability == device.capability
    if not translated and not runs:
        of_device = dotted(device.capability) + (" inside a Tegra chip" if device.tegra else "")
        yield Rejection(
            f"runs on compute capability {_capabilities(architecture)}; this GPU is {of_device}"
        )
    too_old = driver_rejection(manifest.minimum_driver, system, device.tegra)
    if too_old is not None:
        yield too_old
    for axis, asked in request.by_axis:
        if axis.off_step(asked):
            yield Rejection(
                f"expected a {axis.words} in steps of {axis.step}, found {value_text(asked)}"
            )
    missing = dict(binary.missing).get(request.function)
    if missing is not None:
        yield Rejection(missing, binary.folder.fix)
    if kernel is None:
        yield _no_kernel(request, binary)
        return
    yield from _wasteful_axes(request, binary, kernel)
    if kernel.shared_memory > device.shared_memory:
        yield Rejection(
            f"{kernel.name} needs {kernel.shared_memory} bytes of shared memory, "
            f"a block may have {device.shared_memory}"
        )


def _capabilities(architecture: Architecture) -> str:
    """The capabilities that machine code of an architecture runs on, in words."""
    own = dotted(architecture.capability)
    return f"{own} alone" if architecture.exact else f"{own} and later {architecture.major}.x"


def driver_rejection(
    minimum: MinimumDriver, system: System, tegra: bool = False
) -> Rejection | None:
    """The reason why a machine's driver cannot load a binary; None if it can."""
    if system.driver_cuda is not None and system.driver_cuda >= minimum.cuda:
        return None
    return Rejection(
        f"needs driver {minimum.display} or newer (CUDA {dotted(minimum.cuda)}), "
        f"found {driver_text(system)}",
        f"update JetPack to one that supports CUDA {dotted(minimum.cuda)}"
        if tegra
        else f"update the NVIDIA driver to {minimum.display} or newer",
    )


def _wasteful_axes(request: Request, binary: Binary, kernel: KernelRow) -> Iterator[Rejection]:
    held = values_of(request.spec, kernel) or ()
    for (axis, asked), have in zip(request.by_axis, held, strict=True):
        if axis.wasteful(have, asked):
            yield Rejection(
                f"compiled {axis.words} {value_text(have)} would waste more than half of the work",
                _add_kernel(request, binary),
            )


def _no_kernel(request: Request, binary: Binary) -> Rejection:
    rows = [row for row in binary.manifest.kernels if row.function == request.function]
    if not rows:
        return Rejection(f"holds no kernel for {request.function}", _add_function(request, binary))
    dtypes = sorted({row.dtype for row in rows if row.dtype is not None})
    if dtypes and request.dtype not in dtypes:
        return Rejection(f"holds dtypes {', '.join(dtypes)}, not {request.dtype}")
    held = _axis_values(request.spec, (row for row in rows if row.dtype == request.dtype))
    words = kind_text(request.spec.axes, *held)
    asked = request.kind if len(request.axes) > 1 else "".join(map(value_text, request.axes))
    return Rejection(
        f"holds {words or 'other kernels'}, none for {asked}", _add_kernel(request, binary)
    )


def _axis_values(spec: OpSpec, rows: Iterable[KernelRow]) -> list[tuple[Value, ...]]:
    found = (values_of(spec, row) for row in rows)
    return sorted({values for values in found if values is not None})


def _add_kernel(request: Request, binary: Binary) -> str | None:
    """The command that adds the requested kernel to a partial build and keeps the others."""
    added = tuple(
        value
        for axis, asked in request.by_axis
        if (value := axis.compiled_for(asked, request.function)) is not None
    )
    if not is_subset(binary) or len(added) < len(request.axes):
        return None
    values: dict[str, set[Value]] = {}
    for spec in specs():
        rows = (row for row in binary.manifest.kernels if row.function in spec.functions)
        every = {*_axis_values(spec, rows), *([added] if spec is request.spec else [])}
        for index, axis in enumerate(spec.axes):
            values.setdefault(axis.name, set()).update(one[index] for one in every)
    words = [f"arch={binary.kind.name}"]
    words += [
        # Of two ops 64 may be one integer and two: one text.
        f"{short_axis(name)}={','.join(dict.fromkeys(map(value_text, sorted(held))))}"
        for name, held in values.items()
        if held
    ]
    return install_commands.build(" ".join(words), binary.folder.wheel)


def _add_function(request: Request, binary: Binary) -> str | None:
    """The command that adds the request's function to a partial build or an older wheel."""
    if is_subset(binary):
        return _add_kernel(request, binary)
    if binary.version_mismatch is None:  # the wheel of this version does not have it either
        return None
    return binary.folder.fix


def is_subset(binary: Binary) -> bool:
    """Whether a binary was built with some of the kernels of a release."""
    return "+" in binary.manifest.version


def driver_text(system: System) -> str:
    """The driver of a machine, in words."""
    if system.driver_cuda is None:
        return "no NVIDIA driver"
    display = system.driver_display or "a driver"
    return f"{display} (CUDA {dotted(system.driver_cuda)})"
