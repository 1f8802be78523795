"""Which kernel serves a request: a pure function from facts to verdicts.

Every candidate gets a verdict with a reason, in order of preference; the first accepted one is
chosen. Errors, the log and `flashvar doctor` all print this one trace.

The order: the binary of exactly the device's architecture, then those of lower minors of the same
major, then Triton, then the reference (CPU tensors only, unless it is named).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flashvar.binaries import advice
from flashvar.binaries.registry import Binary, Inventory, Refusal
from flashvar.binaries.variant import Architecture
from flashvar.machine.system import Device, System
from flashvar.selection.compatibility import (
    HEAD_DIM_MAX,
    HEAD_DIM_STEP,
    Fault,
    binary_faults,
    dotted,
    nearest_kernel,
)
from flashvar.selection.request import Decision, Overrides, Request, Verdict

NOT_INSTALLED: Final = "not installed"

# The lowest NVIDIA capability on which Triton compiles our kernels for a dtype.
_TRITON_CAPABILITY: Final = {"bf16": (8, 0), "fp16": (7, 5), "fp32": (7, 5)}

_NO_OVERRIDES: Final = Overrides()


def select(
    request: Request,
    system: System,
    inventory: Inventory,
    overrides: Overrides = _NO_OVERRIDES,
) -> Decision:
    """Judge every candidate for `request`; never raises, whatever the machine is."""
    device = None if request.device is None else system.device(request.device)
    common = _not_named("cuda", overrides) or _no_cuda(request, device, system)
    missing = None
    if device is not None and common is None:
        missing = _missing_binary(device, system, inventory, overrides.architecture)
    binaries = [
        *(
            (binary.architecture, _judge_binary(request, device, system, binary, overrides, common))
            for binary in inventory.binaries
        ),
        *(_judge_refusal(refusal, device, common) for refusal in inventory.refusals),
    ]
    verdicts = [
        *([] if missing is None else [missing]),
        *_nearest_first(binaries, device),
        _judge_triton(request, device, system, overrides),
        _judge_reference(request, overrides),
    ]
    return Decision(request, tuple(verdicts), overrides.strict)


def _nearest_first(
    judged: list[tuple[Architecture | None, Verdict]], device: Device | None
) -> list[Verdict]:
    """Those that may match the device first, the highest architecture of them leading."""
    capability = (0, 0) if device is None else device.capability

    def rank(entry: tuple[Architecture | None, Verdict]) -> tuple[int, int, int]:
        architecture = entry[0]
        if architecture is None:  # its manifest cannot be read: it might be anything
            return (1, 0, 0)
        place = 0 if architecture.runs_on(capability) else 2
        return (place, -architecture.major, -architecture.minor)

    return [verdict for _, verdict in sorted(judged, key=rank)]


def _not_named(backend: str, overrides: Overrides) -> Fault | None:
    if overrides.backend in ("auto", backend):
        return None
    return Fault(f'backend="{overrides.backend}" was named')


def _no_cuda(request: Request, device: Device | None, system: System) -> Fault | None:
    """What rules out every binary at once."""
    if request.device is None:
        return Fault("serves CUDA tensors, the request has CPU tensors")
    if system.torch_hip is not None:
        return Fault(f"serves NVIDIA devices, torch is built for ROCm {system.torch_hip}")
    if device is None:
        return Fault(f"expected a device cuda:{request.device}, found {len(system.devices)}")
    if not system.platform.startswith("linux_"):
        return Fault(f"compiled kernels are for Linux, this is {system.platform}")
    if device.tegra:
        return Fault("the drivers of Tegra devices do not take binaries made for other devices")
    return None


def _missing_binary(
    device: Device, system: System, inventory: Inventory, forced: str | None
) -> Verdict | None:
    """The verdict on the binary that should be here, if it is not even installed."""
    wanted = Architecture.parse(forced) if forced else Architecture(*device.capability)
    offers = inventory.offers
    offered = sorted((Architecture.parse(extra) for extra in offers.here), reverse=True)
    best = next((one for one in offered if one.runs_on(wanted.capability)), None)
    if best is not None and not forced:
        wanted = best
    present = {binary.architecture.name for binary in inventory.binaries}
    if wanted.name in present | {refusal.architecture for refusal in inventory.refusals}:
        return None
    candidate = f"cuda {wanted.name}"
    if wanted == best:
        return Verdict(candidate, "cuda", False, NOT_INSTALLED, advice.install(best.extra))
    if wanted.extra in offers.elsewhere:
        reason = f"flashvar has no wheel of it for {system.platform}"
        return Verdict(candidate, "cuda", False, reason)
    if offered or offers.elsewhere:  # an installed flashvar knows what exists; bare sources do not
        every = sorted(map(Architecture.parse, offers.here | offers.elsewhere))
        reason = f"flashvar has no wheel for it, but for {', '.join(one.name for one in every)}"
        return Verdict(candidate, "cuda", False, reason)
    return Verdict(candidate, "cuda", False, NOT_INSTALLED, "nox -s build-dev")


def _judge_refusal(
    refusal: Refusal, device: Device | None, common: Fault | None
) -> tuple[Architecture | None, Verdict]:
    """The verdict on a binary that is here but not trusted, with its fix if that would help."""
    named = refusal.architecture
    architecture = None if named is None else Architecture.parse(named)
    useful = common is None and device is not None
    if architecture is not None and device is not None:
        useful = useful and architecture.runs_on(device.capability)
    reason = f"{refusal.candidate.origin}: {refusal.reason}"
    candidate = f"cuda {named or refusal.candidate.directory.name}"
    fix = refusal.fix if useful else None
    return architecture, Verdict(candidate, "cuda", False, reason, fix)


def _judge_binary(
    request: Request,
    device: Device | None,
    system: System,
    binary: Binary,
    overrides: Overrides,
    common: Fault | None,
) -> Verdict:
    candidate = f"cuda {binary.architecture.name}"
    kernel = nearest_kernel(request, binary.manifest.kernels)
    fault = common
    if fault is None and device is not None:
        fault = next(binary_faults(request, device, system, binary, overrides, kernel), None)
    if fault is not None:
        return Verdict(candidate, "cuda", False, fault.reason, fault.fix, binary)
    padded = kernel is not None and kernel.dims != request.dims
    detail = f" with compiled head dim {kernel.dim_words}" if kernel and padded else ""
    made_for = binary.architecture.capability
    if device is not None and made_for != device.capability:
        detail += f", compiled for {dotted(made_for)}"
    return Verdict(candidate, "cuda", True, f"serves{detail}", None, binary, kernel)


def _judge_triton(
    request: Request, device: Device | None, system: System, overrides: Overrides
) -> Verdict:
    fault = next(_triton_faults(request, device, system, overrides), None)
    if fault is not None:
        return Verdict("triton", "triton", False, fault.reason, fault.fix)
    return Verdict("triton", "triton", True, "serves, compiled at the first call")


def _triton_faults(
    request: Request, device: Device | None, system: System, overrides: Overrides
) -> Iterator[Fault]:
    if fault := _not_named("triton", overrides):
        yield fault
    if overrides.backend == "auto" and overrides.architecture is not None:
        yield Fault(f"FLASHVAR_FORCE_ARCH={overrides.architecture} was set")
    if request.device is None and not (system.interpreted and overrides.backend == "triton"):
        yield Fault("serves CUDA tensors, the request has CPU tensors")
    if request.device is not None and device is None:
        yield Fault(f"expected a device cuda:{request.device}, found {len(system.devices)}")
    lowest = _TRITON_CAPABILITY.get(request.dtype)
    if lowest is None:
        yield Fault(f"serves {', '.join(_TRITON_CAPABILITY)}, not {request.dtype}")
        return
    if device is None and request.dtype == "bf16":
        yield Fault("its interpreter computes with the raw bits of bf16")
    if device is not None and system.torch_hip is None and device.capability < lowest:
        yield Fault(
            f"{request.dtype} needs capability {dotted(lowest)} or higher, "
            f"the device is {dotted(device.capability)}"
        )
    if any(dim % HEAD_DIM_STEP or dim > HEAD_DIM_MAX for dim in request.dims):
        yield Fault(
            f"serves head dims to {HEAD_DIM_MAX} in steps of {HEAD_DIM_STEP}, "
            f"not {request.dim_words}"
        )
    if system.triton is None:
        yield Fault("triton is not installed", "pip install triton")
    if device is None:  # the interpreter compiles nothing
        return
    if system.compiler is None:
        yield Fault("found no C compiler for its launcher", "install gcc, or set CC to a compiler")
    if system.python_headers is None:
        python = "python" + ".".join(system.python.split(".")[:2])
        yield Fault(
            "found no Python.h for its launcher", f"install {python}-dev (Fedora: {python}-devel)"
        )
    if system.triton_cache is None:
        yield Fault(
            "cannot keep what it compiles: its cache folder cannot be written",
            "set TRITON_CACHE_DIR to a folder that can be written",
        )


def _judge_reference(request: Request, overrides: Overrides) -> Verdict:
    fault = _not_named("reference", overrides)
    if fault is None and request.device is not None and overrides.backend == "auto":
        fault = Fault('serves CUDA tensors only when named: backend="reference"')
    if fault is not None:
        return Verdict("reference", "reference", False, fault.reason, fault.fix)
    return Verdict("reference", "reference", True, "serves everything, slowly")
