"""What a result was measured on: card, clocks, driver, versions, commit. It names no machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks.report import BenchmarkError

ROOT: Final = Path(__file__).resolve().parents[1]
# Names the commit where the sources were copied without their .git.
_REVISION: Final = "BENCH_REVISION"
_VERSIONS: Final = ("torch", "triton", "numpy")
# Distributions of contenders, and of the compilers that those bring: told where they are installed.
_PEERS: Final = (
    *("causal-conv1d", "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python", "vllm"),
    *("xformers", "sageattention"),
    *("flash-linear-attention", "fla-core", "flash-qla", "tilelang", "nvidia-cutlass-dsl"),
)
# Without the folder that binaries are found in: what was found there is told by their manifests.
_SETTINGS: Final = ("FLASHVAR_BACKEND", "FLASHVAR_FORCE_ARCH", "FLASHVAR_STRICT")
# nvidia-smi's name and ours.
_CLOCKS: Final = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "power_w",
    "enforced.power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}


def gather(*, device: bool) -> dict[str, Any]:
    """Facts about this machine; with `device` the current CUDA device too (imports torch).

    Raises:
        BenchmarkError: where a device is asked for and there is none.
    """
    facts: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu": {"model": _cpu_model(), "count": len(os.sched_getaffinity(0))},
        "versions": _versions(),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "nvcc": _last_line([shutil.which("nvcc") or "nvcc", "--version"]),
    }
    if device:
        facts["device"] = _device()
        facts["binaries"] = _binaries()
    facts["source"] = source(os.environ, facts.get("binaries", []))
    return facts


def has_device() -> bool:
    """Whether torch, which this imports, can use a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def clocks() -> dict[str, float]:
    """Clocks, power, temperature of the current CUDA device now; {} without nvidia-smi."""
    answer = _nvidia_smi(list(_CLOCKS))
    values = dict(zip(_CLOCKS.values(), answer, strict=False))
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def _device() -> dict[str, Any]:
    import torch

    if not has_device():
        raise BenchmarkError(
            "expected a CUDA device that torch can use, found none: run this on a machine with one"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": next(iter(_nvidia_smi(["driver_version"])), None),
        "cuda_of_torch": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "clocks_before": clocks(),
    }


def _binaries() -> list[dict[str, Any]]:
    """The binaries that flashvar finds here, as their manifests describe them."""
    from flashvar.binaries import registry

    manifests = [binary.manifest for binary in registry.installed().binaries]
    return [
        {
            "architecture": manifest.architecture.name,
            "version": manifest.version,
            "code_kinds": manifest.code_kinds,
            "toolkit": f"{manifest.toolkit.compiler} {manifest.toolkit.version}",
            "revision": manifest.source.revision,
            "dirty": manifest.source.dirty,
            "hash": manifest.source.hash,
        }
        for manifest in manifests
    ]


def _nvidia_smi(fields: Sequence[str]) -> list[str]:
    """Fields of the current device, by its UUID: nvidia-smi counts devices its own way."""
    import torch

    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    line = _last_line(
        [
            "nvidia-smi",
            f"--id=GPU-{uuid}",
            f"--query-gpu={','.join(fields)}",
            "--format=csv,noheader,nounits",
        ]
    )
    return [] if line is None else [part.strip() for part in line.split(",")]


def source(environ: Mapping[str, str], binaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Commit and dirtiness of what is measured, and who says so: nobody may.

    The checkout itself; where this is none, the variable BENCH_REVISION (a commit, clean); else the
    manifests of the binaries, as far as they agree.

    Raises:
        BenchmarkError: where git cannot read the checkout and no variable names the commit.
    """
    # A folder above may be a checkout of something else.
    if (ROOT / ".git").exists():
        git = ["git", "-C", str(ROOT)]
        revision = _last_line([*git, "rev-parse", "HEAD"])
        status = _last_line([*git, "status", "--porcelain"])
        if revision is not None and status is not None:
            return {"revision": revision, "dirty": bool(status), "from": "checkout"}
        if not environ.get(_REVISION):
            raise BenchmarkError(
                f"{ROOT}: expected a checkout that git reads, found `{_failure([*git, 'status'])}`;"
                f" name the commit in {_REVISION}, or, where the checkout belongs to another user "
                f"whom you trust: git config --global --add safe.directory {ROOT}"
            )
    if environ.get(_REVISION):
        return {"revision": environ[_REVISION], "dirty": False, "from": _REVISION}
    built_from = {(binary["revision"], binary["dirty"]) for binary in binaries}
    if len(built_from) == 1:
        revision, dirty = built_from.pop()
        return {"revision": revision, "dirty": dirty, "from": "binaries"}
    return {"revision": None, "dirty": None, "from": None}


def _last_line(command: Sequence[str]) -> str | None:
    """The last line that a command prints, "" for none; None where it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(reversed(done.stdout.strip().splitlines())), "")


def _failure(command: Sequence[str]) -> str:
    """Why a command cannot run, or what it says first as it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return next(iter(done.stderr.strip().splitlines()), f"exit code {done.returncode}")


def _versions() -> dict[str, str | None]:
    found = {name: _version(name) for name in (*_VERSIONS, *_PEERS)}
    return {name: found[name] for name in found if name in _VERSIONS or found[name] is not None}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
