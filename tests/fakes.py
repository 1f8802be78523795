"""Fake machines and binaries, and what is chosen on them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from flashvar.binaries.extras import Extras
from flashvar.binaries.kinds import BinaryKind, Kernel
from flashvar.binaries.manifest import (
    ABI,
    KernelRow,
    Launch,
    LibraryFile,
    Manifest,
    MinimumDriver,
    SourceRevision,
    Toolkit,
)
from flashvar.binaries.registry import Binary, BinaryFolder, Inventory, RejectedFolder
from flashvar.machine.system import Device, System, platform_tag
from flashvar.ops import specs
from flashvar.ops.op import Value
from flashvar.selection.candidates import CandidateResult, Decision
from flashvar.selection.request import Request

KIB = 1024
HEAD_DIMS = (32, 64, 128, 256)
OPS = ("attention_fwd", "attention_bwd")
BF16_64 = Request.of("attention_fwd", "bf16", 0, head_dim=64)
REPLACED = RejectedFolder(
    BinaryFolder(Path("/b"), "wheel b", "again"), "sm_89", "replaced by wheel a", None
)


# What a row launches in a binary that picks one of two families per call.
TWO_FAMILIES = tuple(
    Launch("fwd_kernel", family, when, (128, 64), 128, 48 * KIB)
    for family, when in (("wgmma", "rows start on 16 bytes"), ("mma.sync", "every other call"))
)


def kernel(
    op: str = "attention_fwd", shared_memory: int = 48 * KIB, **axes: str | int
) -> KernelRow:
    """A kernel that launches anywhere unless told otherwise."""
    order = tuple(axes.items())
    return KernelRow(
        function=op,
        axes=order,
        name=Kernel(op, order).name,
        family="fake",
        tile=(128, 64),
        threads=128,
        shared_memory=shared_memory,
        registers=168,
        spill_bytes=0,
        stack_bytes=0,
    )


def manifest(
    code: str,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    dtypes: tuple[str, ...] = ("bf16", "fp16"),
    ops: tuple[str, ...] = OPS,
    version: str = "0.1.0",
) -> Manifest:
    """A manifest of one architecture with a kernel per op, dtype and head dim.

    `code` may name the binary for an older CUDA: "89-cu12".
    """
    kind = BinaryKind.parse(code)
    architecture, older = kind.architecture, kind.cuda == 12
    return Manifest(
        abi=ABI,
        project="flashvar",
        version=version,
        distribution=f"flashvar-{kind.extra}",
        source=SourceRevision("0" * 40, False, "0" * 64),
        architecture=architecture,
        code_kinds=("sass",),
        toolkit=Toolkit("nvcc", "13.0.88", "12.9.86" if older else None),
        minimum_driver=MinimumDriver((12, 0), "525") if older else MinimumDriver((13, 0), "580"),
        platform=platform_tag(),
        library=LibraryFile(f"libflashvar_{kind.extra.replace('-', '_')}.so", 4, "0" * 64),
        kernels=tuple(
            kernel(op, dtype=dtype, head_dim=head_dim)
            for op in ops
            for head_dim in head_dims
            for dtype in dtypes
        ),
    )


def of_other_ops() -> tuple[KernelRow, ...]:
    """A kernel per function, dtype and usual value of the axes of every op but attention."""
    return tuple(
        kernel(function, dtype=dtype, **dict(zip(names, values, strict=True)))
        for spec in specs()
        if spec.name != "attention"
        for function in spec.functions
        for names in (tuple(axis.name for axis in spec.axes),)
        for dtype in spec.usual_dtypes
        for values in product(*([_usual(one) for one in axis.usual] for axis in spec.axes))
    )


def _usual(value: Value) -> str | int:
    """A value as manifests have it."""
    return value if isinstance(value, str) else value[0]


def binary(code: str, **changes: Any) -> Binary:
    """An installed wheel of `code`; `changes` replace fields of its manifest."""
    extra = BinaryKind.parse(code).extra
    candidate = BinaryFolder(Path("/fake") / extra, f"wheel flashvar-{extra} 0.1.0", "reinstall it")
    made = manifest(code)
    made = replace(made, kernels=made.kernels + of_other_ops())
    return Binary(candidate, replace(made, **changes))


def inventory(*codes: str, extras: tuple[str, ...] = ("sm80", "sm86", "sm89", "sm90")) -> Inventory:
    """These wheels installed, those extras offered."""
    return Inventory(tuple(binary(code) for code in codes), (), Extras(frozenset(extras)))


def device(
    name: str,
    major: int,
    minor: int,
    shared_memory: int,
    *,
    index: int = 0,
    multiprocessors: int = 108,
    tegra: bool = False,
) -> Device:
    """A device by its data sheet."""
    return Device(
        index=index,
        name=name,
        capability=(major, minor),
        shared_memory=shared_memory,
        multiprocessors=multiprocessors,
        memory=80 * 2**30,
        tegra=tegra,
    )


A100 = device("NVIDIA A100", 8, 0, 163 * KIB)
A100_MIG = device("NVIDIA A100 MIG 1g.10gb", 8, 0, 163 * KIB, multiprocessors=14)
RTX_3090 = device("NVIDIA GeForce RTX 3090", 8, 6, 99 * KIB)
ORIN = device("NVIDIA Jetson AGX Orin", 8, 7, 163 * KIB, tegra=True)
RTX_4090 = device("NVIDIA GeForce RTX 4090", 8, 9, 99 * KIB)
L40S = device("NVIDIA L40S", 8, 9, 99 * KIB)
H100 = device("NVIDIA H100", 9, 0, 227 * KIB)
H200 = device("NVIDIA H200", 9, 0, 227 * KIB)
GH200 = device("NVIDIA GH200 480GB", 9, 0, 227 * KIB)
MI210 = device("AMD Instinct MI210", 9, 0, 64 * KIB)
MI300 = device("AMD Instinct MI300X", 9, 4, 64 * KIB)
GB200 = device("NVIDIA GB200", 10, 0, 227 * KIB)
B200 = device("NVIDIA B200", 10, 0, 227 * KIB)
B300 = device("NVIDIA B300 SXM6", 10, 3, 227 * KIB)
RTX_5090 = device("NVIDIA GeForce RTX 5090", 12, 0, 99 * KIB)
SPARK = device("NVIDIA GB10", 12, 1, 99 * KIB)
RUBIN = device("a GPU of a later major", 14, 0, 227 * KIB)
THOR = device("NVIDIA Thor", 11, 0, 227 * KIB, tegra=True)
T4 = device("Tesla T4", 7, 5, 64 * KIB)
V100 = device("Tesla V100", 7, 0, 96 * KIB)


def system(*devices: Device, **changes: Any) -> System:
    """A healthy machine with these devices; `changes` replace its other facts."""
    healthy = System(
        devices=tuple(replace(one, index=index) for index, one in enumerate(devices)),
        driver_cuda=(13, 0),
        driver_display="580.82.07",
        torch="2.13.0",
        torch_cuda="13.0",
        triton="3.7.1",
        compiler="/usr/bin/gcc",
        python_headers="/usr/include/python3.11",
        triton_cache="/home/user/.triton/cache",
        python="3.11.7",
        platform="linux_x86_64",
    )
    return replace(healthy, **changes)


def result_of(decision: Decision, candidate: str) -> CandidateResult:
    (found,) = [one for one in decision.results if one.candidate == candidate]
    return found


def chosen(decision: Decision) -> str | None:
    return decision.chosen.candidate if decision.chosen else None
