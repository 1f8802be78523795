"""Fake machines, and what is expected of flashvar on each: the table of test_systems.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import fakes

from flashvar.binaries import install_commands
from flashvar.binaries.registry import BinaryFolder, Inventory, RejectedFolder
from flashvar.cli.diagnosis import Report, examine
from flashvar.machine.system import System
from flashvar.selection.request import Overrides

# flashvar[all] on x86-64, and on aarch64.
X86_EXTRAS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
X86_OLDER = tuple(f"{extra}-cu12" for extra in X86_EXTRAS)
EVERY_WHEEL = fakes.inventory(
    "80", "86", "89", "90a", "100", "120", extras=(*X86_EXTRAS, *X86_OLDER)
)
ARM = fakes.inventory(
    "87", "90a", "100", "110", "120", extras=("sm87", "sm90", "sm100", "sm110", "sm120")
)
NO_WHEEL = fakes.inventory()
# With those for drivers of CUDA 12 beside them, and offered but not installed.
BOTH = fakes.inventory("89", "89-cu12", "90a", "90a-cu12", extras=(*X86_EXTRAS, *X86_OLDER))
OLDER_OFFERED = fakes.inventory("89", extras=("sm89", "sm89-cu12"))
SM80_WHEEL = fakes.inventory("80")
# A tile of head dim 256 that an A100 has the shared memory for, and other 8.x devices have not.
BIG_TILE_WHEEL = replace(
    NO_WHEEL,
    binaries=(
        fakes.binary(
            "80",
            kernels=(
                *(
                    fakes.kernel(
                        op, dtype=dtype, head_dim=head_dim, shared_memory=needed * fakes.KIB
                    )
                    for op in fakes.OPS
                    for dtype in ("bf16", "fp16")
                    for head_dim, needed in ((128, 64), (256, 160))
                ),
                *fakes.of_other_ops(),
            ),
        ),
    ),
)
# Forward kernels alone: in a wheel of an older flashvar, and in a build of a subset.
FORWARD = fakes.manifest("80", ops=("attention_fwd",)).kernels
OLDER_WHEEL = replace(
    NO_WHEEL, binaries=(fakes.binary("80", kernels=FORWARD, version="0.0.9"), fakes.binary("90a"))
)
PARTIAL_BUILD = replace(
    NO_WHEEL, binaries=(fakes.binary("80", kernels=FORWARD, version="0.1.0+attentionfwd"),)
)
DAMAGED_WHEEL = replace(
    NO_WHEEL,
    rejected=(
        RejectedFolder(
            BinaryFolder(Path("/site/flashvar_sm90"), "wheel flashvar-sm90 0.1.0", "reinstall it"),
            "sm_90",
            "expected libflashvar_sm90.so to have 4 bytes, found 3",
            "pip install --force-reinstall --no-deps flashvar-sm90",
        ),
    ),
)

AARCH64 = {"platform": "linux_aarch64"}
JETPACK_6 = {**AARCH64, "driver_cuda": (12, 6), "driver_display": "540.4.0", "torch_cuda": "12.6"}
DRIVER_550 = {"driver_cuda": (12, 4), "driver_display": "550.54.15", "torch_cuda": "12.6"}
DRIVER_570 = {"driver_cuda": (12, 8), "driver_display": "570.86.15", "torch_cuda": "12.8"}
UPDATE = "update the NVIDIA driver to 580 or newer"
ROCM = {"torch_hip": "6.4", "torch_cuda": None, "driver_cuda": None, "driver_display": None}
NO_DRIVER = {"driver_cuda": None, "driver_display": None}


@dataclass(frozen=True)
class Machine:
    """A machine and what is expected of it; `runs` has an entry per device (one for the CPU)."""

    system: System
    runs: tuple[str | None, ...]  # the forward, and the backward where nothing else is said
    why: tuple[str, str]  # a candidate on the first device, and words of its reason
    fixes: tuple[str, ...] = ()  # all of those that doctor names
    exit_code: int = 0
    wheels: Inventory = EVERY_WHEEL
    dtype: str = "bf16"
    head_dim: int = 64
    backward: tuple[str | None, ...] | None = None
    why_backward: tuple[str, str] | None = None

    def expected(self, op: str) -> tuple[str | None, ...]:
        """What runs `op` on each device."""
        return self.runs if op == "attention_fwd" or self.backward is None else self.backward

    def reason(self, op: str) -> tuple[str, str]:
        """A candidate for `op` on the first device, and words of its reason."""
        return self.why if op == "attention_fwd" else self.why_backward or self.why


@cache
def examined(name: str) -> Report:
    """What doctor says of a machine, unless an environment variable asks for something else."""
    machine = MACHINES[name]
    return examine(machine.system, machine.wheels, Overrides())


def pip(extra: str) -> str:
    return install_commands.install(extra)


CUDA_80, CUDA_86, CUDA_89, CUDA_90 = "cuda sm_80", "cuda sm_86", "cuda sm_89", "cuda sm_90"

MACHINES = {
    "A100": Machine(fakes.system(fakes.A100), (CUDA_80,), (CUDA_86, "this GPU is 8.0")),
    "A100 MIG slice": Machine(fakes.system(fakes.A100_MIG), (CUDA_80,), (CUDA_80, "runs it")),
    "RTX 3090": Machine(fakes.system(fakes.RTX_3090), (CUDA_86,), (CUDA_89, "this GPU is 8.6")),
    "RTX 4090": Machine(fakes.system(fakes.RTX_4090), (CUDA_89,), (CUDA_86, "compiled for 8.6")),
    "L40S": Machine(fakes.system(fakes.L40S), (CUDA_89,), ("triton", "compiled at the first call")),
    "H100": Machine(fakes.system(fakes.H100), (CUDA_90,), (CUDA_89, "this GPU is 9.0")),
    "H200": Machine(fakes.system(fakes.H200), (CUDA_90,), (CUDA_90, "runs it")),
    "GH200, aarch64": Machine(
        fakes.system(fakes.GH200, platform="linux_aarch64"), (CUDA_90,), (CUDA_90, "runs it")
    ),
    "GB200": Machine(
        fakes.system(fakes.GB200, **AARCH64), ("cuda sm_100",), (CUDA_90, "9.0 alone"), wheels=ARM
    ),
    "B200": Machine(fakes.system(fakes.B200), ("cuda sm_100",), (CUDA_90, "capability 9.0 alone")),
    "B300": Machine(
        fakes.system(fakes.B300), ("cuda sm_100",), ("cuda sm_100", "runs it, compiled for 10.0")
    ),
    "RTX 5090": Machine(
        fakes.system(fakes.RTX_5090), ("cuda sm_120",), (CUDA_90, "9.0 alone; this GPU is 12.0")
    ),
    "Spark": Machine(
        fakes.system(fakes.SPARK, **AARCH64),
        ("cuda sm_120",),
        ("cuda sm_120", "runs it, compiled for 12.0"),
        wheels=ARM,
    ),
    "Spark, nothing installed": Machine(
        fakes.system(fakes.SPARK, **AARCH64),
        ("triton",),
        ("cuda sm_120", "not installed"),
        fixes=(pip("sm120"),),
        wheels=replace(ARM, binaries=()),
    ),
    "Orin": Machine(
        fakes.system(fakes.ORIN, **AARCH64),
        ("cuda sm_87",),
        (CUDA_90, "9.0 alone; this GPU is 8.7 inside a Tegra chip"),
        wheels=ARM,
    ),
    "Orin, JetPack 6": Machine(
        fakes.system(fakes.ORIN, **JETPACK_6),
        ("triton",),
        ("cuda sm_87", "needs driver 580 or newer (CUDA 13.0), found 540.4.0 (CUDA 12.6)"),
        fixes=("update JetPack to one that supports CUDA 13.0",),
        wheels=ARM,
    ),
    "Orin, JetPack 6, nothing installed": Machine(
        fakes.system(fakes.ORIN, **JETPACK_6),
        ("triton",),
        ("cuda sm_87", "not installed, and needs driver 580 or newer (CUDA 13.0), found 540.4.0"),
        fixes=("update JetPack to one that supports CUDA 13.0",),
        wheels=replace(ARM, binaries=()),
    ),
    "Thor": Machine(
        fakes.system(fakes.THOR, **AARCH64),
        ("cuda sm_110",),
        ("cuda sm_110", "runs it"),
        wheels=ARM,
    ),
    "a card of 8.9 beside an Arm processor": Machine(
        fakes.system(fakes.L40S, **AARCH64),
        ("triton",),
        ("cuda sm_87", "runs on compute capability 8.7 alone; this GPU is 8.9"),
        wheels=ARM,
    ),
    "a later major": Machine(
        fakes.system(fakes.RUBIN), ("triton",), ("cuda sm_140", "no wheel for it, only for sm_80")
    ),
    "ROCm MI210 that reports 9.0": Machine(
        fakes.system(fakes.MI210, **ROCM), ("triton",), (CUDA_90, "torch is built for ROCm 6.4")
    ),
    "ROCm MI300": Machine(
        fakes.system(fakes.MI300, **ROCM), ("triton",), (CUDA_90, "torch is built for ROCm 6.4")
    ),
    "T4, bf16": Machine(
        fakes.system(fakes.T4),
        (None,),
        ("triton", "needs capability 8.0 or higher, this GPU is 7.5"),
        exit_code=1,  # nothing serves gated_delta_rule
    ),
    "T4, fp16": Machine(
        fakes.system(fakes.T4),
        ("triton",),
        ("cuda sm_75", "no wheel"),
        exit_code=1,  # as above
        dtype="fp16",
    ),
    "V100": Machine(
        fakes.system(fakes.V100), (None,), ("triton", "this GPU is 7.0"), exit_code=1, dtype="fp16"
    ),
    "driver 570": Machine(
        fakes.system(fakes.L40S, **DRIVER_570),
        ("triton",),
        (CUDA_89, "needs driver 580 or newer (CUDA 13.0), found 570.86.15 (CUDA 12.8)"),
        fixes=(pip("sm89-cu12"), UPDATE),
    ),
    "driver 550": Machine(
        fakes.system(fakes.H100, **DRIVER_550),
        ("triton",),
        (CUDA_90, "found 550.54.15 (CUDA 12.4)"),
        fixes=(pip("sm90-cu12"), UPDATE),
    ),
    "driver 570, both wheels": Machine(
        fakes.system(fakes.L40S, **DRIVER_570),
        (f"{CUDA_89}-cu12",),
        (f"{CUDA_89}-cu12", "runs it"),
        fixes=(UPDATE,),
        wheels=BOTH,
    ),
    "driver 580, both wheels": Machine(
        fakes.system(fakes.L40S, fakes.H100),
        (CUDA_89, CUDA_90),
        (f"{CUDA_89}-cu12", "runs it"),
        wheels=BOTH,
    ),
    "driver 570, the wheel for newer ones": Machine(
        fakes.system(fakes.L40S, **DRIVER_570),
        ("triton",),
        (f"{CUDA_89}-cu12", "not installed"),
        fixes=(pip("sm89-cu12"), UPDATE),
        wheels=OLDER_OFFERED,
    ),
    "driver 550, torch for CUDA 13": Machine(
        fakes.system(
            problem="The NVIDIA driver on your system is too old",
            driver_cuda=(12, 4),
            driver_display="550.54.15",
        ),
        ("reference",),
        (CUDA_90, "runs only CUDA tensors"),
        fixes=(
            "update the NVIDIA driver to one that supports CUDA 13.0, "
            "or install a torch built for CUDA 12",
        ),
        exit_code=1,
    ),
    "torch for the CPU on a machine with a GPU": Machine(
        fakes.system(torch="2.13.0+cpu", torch_cuda=None),
        ("reference",),
        ("triton", "runs only CUDA tensors"),
        fixes=("install a torch built for CUDA; torch 2.13.0+cpu is CPU-only",),
        exit_code=1,
    ),
    "no torch": Machine(
        System(problem="torch cannot be imported: No module named 'torch'"),
        ("reference",),
        (CUDA_90, "runs only CUDA tensors"),
        fixes=("pip install torch",),
        exit_code=1,
    ),
    "no GPU": Machine(
        fakes.system(**NO_DRIVER),
        ("reference",),
        (CUDA_90, "runs only CUDA tensors, found CPU tensors"),
        exit_code=1,
    ),
    "3090 and 4090": Machine(
        fakes.system(fakes.RTX_3090, fakes.RTX_4090),
        (CUDA_86, CUDA_89),
        (CUDA_89, "this GPU is 8.6"),
    ),
    "A100 and H100": Machine(
        fakes.system(fakes.A100, fakes.H100), (CUDA_80, CUDA_90), (CUDA_90, "this GPU is 8.0")
    ),
    "A100 and H100, only the sm_80 wheel": Machine(
        fakes.system(fakes.A100, fakes.H100),
        (CUDA_80, "triton"),
        (CUDA_80, "runs it"),
        fixes=(pip("sm90"),),
        wheels=SM80_WHEEL,
    ),
    "nothing installed": Machine(
        fakes.system(fakes.L40S),
        ("triton",),
        (CUDA_89, "not installed"),
        fixes=(pip("sm89"),),
        wheels=NO_WHEEL,
    ),
    "only the sm_80 wheel on 8.9, a tile that fits": Machine(
        fakes.system(fakes.L40S),
        (CUDA_80,),
        (CUDA_80, "runs it, compiled for 8.0"),
        fixes=(pip("sm89"),),
        wheels=BIG_TILE_WHEEL,
        head_dim=128,
    ),
    "only the sm_80 wheel on 8.9, a tile that does not fit": Machine(
        fakes.system(fakes.L40S),
        ("triton",),
        (CUDA_80, "needs 163840 bytes of shared memory, a block may have 101376"),
        fixes=(pip("sm89"),),
        wheels=BIG_TILE_WHEEL,
        head_dim=256,
    ),
    "only the sm_80 wheel on 9.0": Machine(
        fakes.system(fakes.H100),
        ("triton",),
        (CUDA_80, "runs on compute capability 8.0 and later 8.x; this GPU is 9.0"),
        fixes=(pip("sm90"),),
        wheels=SM80_WHEEL,
    ),
    "an older wheel without backward kernels": Machine(
        fakes.system(fakes.A100, fakes.H100),
        (CUDA_80, CUDA_90),
        (CUDA_80, "runs it"),
        fixes=("reinstall it",),
        wheels=OLDER_WHEEL,
        backward=("triton", CUDA_90),
        why_backward=(CUDA_80, "holds no kernel for attention_bwd"),
    ),
    "a build of the forward alone": Machine(
        fakes.system(fakes.A100),
        (CUDA_80,),
        (CUDA_80, "runs it"),
        fixes=("nox -s build-dev -- arch=sm_80 hdim=32,64,128,256",),
        wheels=PARTIAL_BUILD,
        backward=("triton",),
        why_backward=(CUDA_80, "holds no kernel for attention_bwd"),
    ),
    "a build of the forward alone, no triton": Machine(
        fakes.system(fakes.A100, triton=None),
        (CUDA_80,),
        (CUDA_80, "runs it"),
        fixes=("nox -s build-dev -- arch=sm_80 hdim=32,64,128,256", "pip install triton"),
        wheels=PARTIAL_BUILD,
        backward=(None,),
        why_backward=("triton", "triton is not installed"),
        exit_code=1,
    ),
    "damaged wheel": Machine(
        fakes.system(fakes.H100),
        ("triton",),
        (CUDA_90, "wheel flashvar-sm90 0.1.0: expected libflashvar_sm90.so to have 4 bytes"),
        fixes=("pip install --force-reinstall --no-deps flashvar-sm90",),
        wheels=DAMAGED_WHEEL,
    ),
    "triton missing": Machine(
        fakes.system(fakes.T4, triton=None),
        (None,),
        ("triton", "triton is not installed"),
        fixes=("pip install triton",),
        exit_code=1,
        dtype="fp16",
    ),
    "triton missing where a wheel serves": Machine(
        fakes.system(fakes.H100, triton=None), (CUDA_90,), ("triton", "triton is not installed")
    ),
    "compiler missing": Machine(
        fakes.system(fakes.T4, compiler=None),
        (None,),
        ("triton", "no C compiler"),
        fixes=("install gcc, or set CC to a compiler",),
        exit_code=1,
        dtype="fp16",
    ),
    "Python.h missing": Machine(
        fakes.system(fakes.T4, python_headers=None),
        (None,),
        ("triton", "no Python.h"),
        fixes=("install python3.11-dev (Fedora: python3.11-devel)",),
        exit_code=1,
        dtype="fp16",
    ),
    "read-only home": Machine(
        fakes.system(fakes.T4, triton_cache=None),
        (None,),
        ("triton", "its cache folder cannot be written"),
        fixes=("set TRITON_CACHE_DIR to a folder that can be written",),
        exit_code=1,
        dtype="fp16",
    ),
    "read-only home where a wheel serves": Machine(
        fakes.system(fakes.A100, triton_cache=None),
        (CUDA_80,),
        ("triton", "its cache folder cannot be written"),
    ),
}
