"""The rules of selection: a pure function from the facts of a machine to candidate results.

Every candidate gets a result with a reason, in order of preference; the first accepted one is
chosen. Errors, the log and `flashvar doctor` print the same results.

The order is: the binary of the device's own architecture, binaries of lower minors of the same
major, of each the one for newer drivers first; Triton; and the reference, which runs CPU tensors,
and CUDA tensors when it is named or the function has no kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flashvar.binaries import install_commands
from flashvar.binaries.kinds import Architecture, BinaryKind, dotted
from flashvar.binaries.manifest import KernelRow, MinimumDriver
from flashvar.binaries.registry import Binary, Inventory, RejectedFolder
from flashvar.machine import driver
from flashvar.machine.system import Device, System
from flashvar.ops.op import value_text
from flashvar.selection.candidates import CandidateResult, Decision, Rejection
from flashvar.selection.compatibility import (
    driver_rejection,
    nearest_kernel,
    rejections,
    values_of,
)
from flashvar.selection.request import Overrides, Request

_NOT_INSTALLED: Final = "not installed"

_NO_OVERRIDES: Final = Overrides()


def select(
    request: Request,
    system: System,
    inventory: Inventory,
    overrides: Overrides = _NO_OVERRIDES,
) -> Decision:
    """The decision for `request`: a result for every candidate. Never raises."""
    device = None if request.device is None else system.device(request.device)
    common = _other_backend_named("cuda", overrides) or _no_cuda(request, device, system)
    missing = None
    if device is not None and common is None:
        missing = _missing_binary(device, system, inventory, overrides.kind)
    # Without binaries one result stands for all of them; a call on the CPU gets it only if it names
    # the backend.
    wants_cuda = ("cuda",) if request.device is None else ("auto", "cuda")
    if common is not None and overrides.backend in wants_cuda and not inventory.binaries:
        missing = CandidateResult("cuda", "cuda", False, common.reason)
    binaries = [
        *(
            (binary.kind, _result_of_binary(request, device, system, binary, overrides, common))
            for binary in inventory.binaries
        ),
        *(_result_of_rejected(rejected, device, common) for rejected in inventory.rejected),
    ]
    results = [
        *([] if missing is None else [missing]),
        *_nearest_first(binaries, device),
        _result_of_triton(request, device, system, overrides),
        _result_of_reference(request, overrides),
    ]
    return Decision(request, tuple(results), overrides.strict)


def _nearest_first(
    results: list[tuple[BinaryKind | None, CandidateResult]], device: Device | None
) -> list[CandidateResult]:
    """Results sorted: binaries that run on the device first, the highest architecture first."""
    capability = (0, 0) if device is None else device.capability

    def rank(entry: tuple[BinaryKind | None, CandidateResult]) -> tuple[int, int, int, int]:
        kind = entry[0]
        if kind is None:  # the manifest cannot be read, so the architecture is unknown
            return (1, 0, 0, 0)
        major, minor = kind.architecture.capability
        return (0 if kind.architecture.runs_on(capability) else 2, -major, -minor, -kind.cuda)

    return [result for _, result in sorted(results, key=rank)]


def _other_backend_named(backend: str, overrides: Overrides) -> Rejection | None:
    if overrides.backend in ("auto", backend):
        return None
    return Rejection(f'backend="{overrides.backend}" was named')


def _no_cuda(request: Request, device: Device | None, system: System) -> Rejection | None:
    """The reason why no binary at all can run a call, or None."""
    if request.device is None:
        return Rejection("runs only CUDA tensors, found CPU tensors")
    if system.torch_hip is not None:
        return Rejection(f"runs on NVIDIA devices, torch is built for ROCm {system.torch_hip}")
    if device is None:
        return Rejection(f"expected a device cuda:{request.device}, found {len(system.devices)}")
    if not system.platform.startswith("linux_"):
        return Rejection(f"compiled kernels are for Linux, this is {system.platform}")
    return None


def _missing_binary(
    device: Device, system: System, inventory: Inventory, forced: str | None
) -> CandidateResult | None:
    """The result of the binary that is forced, or else fits the device best, if it is missing."""
    extras = inventory.extras
    offered = sorted(map(BinaryKind.parse, extras.here), reverse=True)
    fitting = [one for one in offered if one.architecture.runs_on(device.capability)]
    best = next((one for one in fitting if one.runs_with(system.driver_cuda)), None)
    best = best or next(iter(fitting), None) or BinaryKind(Architecture(*device.capability))
    wanted = BinaryKind.parse(forced) if forced else best
    present = {binary.kind.name for binary in inventory.binaries}
    if wanted.name in present | {rejected.kind for rejected in inventory.rejected}:
        return None
    candidate = f"cuda {wanted.name}"
    if wanted in offered:
        if wanted not in fitting:  # installing it would change nothing
            return CandidateResult(candidate, "cuda", False, _NOT_INSTALLED, missing=True)
        too_old = driver_rejection(_minimum_driver(wanted), system, device.tegra)
        if too_old is not None:
            reason = f"{_NOT_INSTALLED}, and {too_old.reason}"
            return CandidateResult(candidate, "cuda", False, reason, too_old.fix, missing=True)
        fix = install_commands.install(wanted.extra)
        return CandidateResult(candidate, "cuda", False, _NOT_INSTALLED, fix, missing=True)
    if wanted.extra in extras.elsewhere:
        reason = f"flashvar has no wheel for {system.platform}"
        return CandidateResult(candidate, "cuda", False, reason)
    if (
        offered or extras.elsewhere
    ):  # an installed flashvar lists its wheels; a source tree does not
        every = sorted(
            {BinaryKind.parse(one).architecture for one in extras.here | extras.elsewhere}
        )
        reason = f"flashvar has no wheel for it, only for {', '.join(one.name for one in every)}"
        return CandidateResult(candidate, "cuda", False, reason)
    fix = "nox -s build-dev"
    return CandidateResult(candidate, "cuda", False, _NOT_INSTALLED, fix, missing=True)


def _minimum_driver(kind: BinaryKind) -> MinimumDriver:
    """The oldest driver of the machine code of a kind."""
    return MinimumDriver((kind.cuda, 0), driver.BRANCHES[kind.cuda, 0])


def _result_of_rejected(
    rejected: RejectedFolder, device: Device | None, common: Rejection | None
) -> tuple[BinaryKind | None, CandidateResult]:
    """The result of a rejected binary; with the fix, if the device could use the binary."""
    named = rejected.kind
    kind = None if named is None else BinaryKind.parse(named)
    useful = common is None and device is not None
    if kind is not None and device is not None:
        useful = useful and kind.architecture.runs_on(device.capability)
    candidate = f"cuda {named or rejected.folder.path.name}"
    fix = rejected.fix if useful else None
    return kind, CandidateResult(candidate, "cuda", False, str(rejected), fix, rejected=rejected)


def _result_of_binary(
    request: Request,
    device: Device | None,
    system: System,
    binary: Binary,
    overrides: Overrides,
    common: Rejection | None,
) -> CandidateResult:
    candidate = f"cuda {binary.kind.name}"
    kernel = nearest_kernel(request, binary.manifest.kernels)
    rejection = common
    if rejection is None and device is not None:
        rejection = next(rejections(request, device, system, binary, overrides, kernel), None)
    if rejection is not None:
        return CandidateResult(candidate, "cuda", False, rejection.reason, rejection.fix, binary)
    detail = _larger_axes(request, kernel)
    made_for = binary.architecture.capability
    if device is not None and made_for != device.capability:
        detail += f", compiled for {dotted(made_for)}"
    return CandidateResult(candidate, "cuda", True, f"runs it{detail}", None, binary, kernel)


def _larger_axes(request: Request, kernel: KernelRow | None) -> str:
    """The axes in which the kernel is larger than the request, in words."""
    held = None if kernel is None else values_of(request.spec, kernel)
    larger = [
        f" with compiled {axis.words} {value_text(have)}"
        for (axis, asked), have in zip(request.by_axis, held or request.axes, strict=True)
        if have != asked
    ]
    return ",".join(larger)


def _result_of_triton(
    request: Request, device: Device | None, system: System, overrides: Overrides
) -> CandidateResult:
    rejection = next(_triton_rejections(request, device, system, overrides), None)
    if rejection is not None:
        return CandidateResult("triton", "triton", False, rejection.reason, rejection.fix)
    return CandidateResult("triton", "triton", True, "runs it, compiled at the first call")


def _triton_rejections(
    request: Request, device: Device | None, system: System, overrides: Overrides
) -> Iterator[Rejection]:
    if rejection := _other_backend_named("triton", overrides):
        yield rejection
    if overrides.backend == "auto" and overrides.kind is not None:
        yield Rejection(f"FLASHVAR_FORCE_ARCH={overrides.kind} was set")
    if request.device is None and not (system.interpreted and overrides.backend == "triton"):
        yield Rejection("runs only CUDA tensors, found CPU tensors")
    if request.device is not None and device is None:
        yield Rejection(f"expected a device cuda:{request.device}, found {len(system.devices)}")
    dtypes = request.spec.in_triton(request.function)
    if not dtypes:
        yield Rejection(f"has no kernel for {request.function}")
        return
    lowest = dtypes.get(request.dtype)
    if lowest is None:
        yield Rejection(f"runs {', '.join(dtypes)}, not {request.dtype}")
        return
    if device is None and request.dtype == "bf16":
        yield Rejection("its interpreter computes with the raw bits of bf16")
    if device is not None and system.torch_hip is None and device.capability < lowest:
        yield Rejection(
            f"{request.dtype} needs capability {dotted(lowest)} or higher, "
            f"this GPU is {dotted(device.capability)}"
        )
    for axis, asked in request.by_axis:
        if axis.off_step(asked) or axis.too_large(asked):
            yield Rejection(f"runs {axis.words}s {axis.limits}, not {value_text(asked)}")
        elif device is not None and axis.too_large_in_triton(asked, device.capability):
            assert axis.triton_below is not None
            since, largest = axis.triton_below
            yield Rejection(
                f"{axis.words}s above {largest} need capability {dotted(since)} or higher, "
                f"this GPU is {dotted(device.capability)}"
            )
    if system.triton is None:
        yield Rejection("triton is not installed", "pip install triton")
    if device is None:  # the interpreter compiles nothing
        return
    if system.compiler is None:
        yield Rejection(
            "found no C compiler for its launcher", "install gcc, or set CC to a compiler"
        )
    if system.python_headers is None:
        python = "python" + ".".join(system.python.split(".")[:2])
        yield Rejection(
            "found no Python.h for its launcher", f"install {python}-dev (Fedora: {python}-devel)"
        )
    if system.triton_cache is None:
        yield Rejection(
            "cannot store compiled kernels: its cache folder cannot be written",
            "set TRITON_CACHE_DIR to a folder that can be written",
        )


def _result_of_reference(request: Request, overrides: Overrides) -> CandidateResult:
    spec = request.spec
    rejection = _other_backend_named("reference", overrides)
    unnamed = request.device is not None and overrides.backend == "auto"
    if rejection is None and unnamed and spec.has_kernels(request.function):
        rejection = Rejection('runs CUDA tensors only when named: backend="reference"')
    if rejection is None and request.dtype not in spec.reference:
        rejection = Rejection(f"runs {', '.join(spec.reference)}, not {request.dtype}")
    if rejection is not None:
        return CandidateResult("reference", "reference", False, rejection.reason, rejection.fix)
    return CandidateResult("reference", "reference", True, "runs everything, slowly")
