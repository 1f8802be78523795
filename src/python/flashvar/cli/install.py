"""`flashvar install`: brings the binaries of this machine's GPUs into this environment."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flashvar.binaries import loader, registry
from flashvar.binaries.kinds import dotted
from flashvar.binaries.manifest import Manifest
from flashvar.binaries.registry import Binary, Inventory
from flashvar.errors import BinaryError, DriverTooOldError, InstallError, NoWheelForGpuError
from flashvar.installing import (
    check_wheel,
    destination,
    installer,
    record,
    repack,
    source,
    temporary,
    wheel_requirements,
)
from flashvar.installing.installer import Installer
from flashvar.installing.source import WheelSource
from flashvar.installing.wheel_requirements import WheelRequirement
from flashvar.machine import driver
from flashvar.machine.driver import Gpu
from flashvar.machine.system import System, is_tegra, platform_tag
from flashvar.selection.compatibility import driver_rejection, driver_text

_MEGABYTE = 1_000_000


class Wheel(NamedTuple):
    """A wheel that was fetched and checked."""

    requirement: WheelRequirement
    files: Mapping[str, bytes]
    manifest: Manifest


class GpuGroup(NamedTuple):
    """GPUs of one capability, and the binary that is best for them and their driver."""

    gpus: Sequence[Gpu]
    requirement: WheelRequirement


def run(chosen: argparse.Namespace) -> int:
    """Fetch, check and install what is missing; returns the exit code.

    Raises:
        InstallError: nothing was installed, or not everything; its class says which kind.
    """
    known = wheel_requirements.of_installed(platform_tag())
    system: System | None = None  # None: the GPUs that are named are in another machine
    if chosen.arch is None:
        system = System(driver_cuda=driver.cuda_version(), driver_display=driver.display_version())
        groups = _groups_of_machine(driver.gpus(), system, known)
    else:
        groups = _groups_of_names(chosen.arch, known)
    with destination.locked():
        return _install(chosen, groups, system)


def _install(chosen: argparse.Namespace, groups: Sequence[GpuGroup], system: System | None) -> int:
    """Fetch, check and install what is missing for groups of GPUs; returns the exit code."""
    present = {
        binary.manifest.distribution: binary.manifest.version
        for binary in _of_environment().binaries
        if _is_usable(binary, system)
    }
    for group in groups:
        name = group.requirement.distribution
        if name in present:
            print(f"installed already: {name}=={present[name]}, for {_words(group.gpus)}")
    missing = [group for group in groups if group.requirement.distribution not in present]
    if not missing:
        return 0
    where = source.find(chosen.source, os.environ, extra=missing[0].requirement.kind.extra)
    tool = installer.find(os.environ)
    with temporary.folder() as folder:
        checked = folder / "checked"
        wheels: dict[str, Wheel] = {}  # by distribution: GPUs of two capabilities may share one
        for group in missing:
            name = group.requirement.distribution
            if name not in wheels:
                wheels[name] = _fetch(group, where, tool, folder)
            check_wheel.fits(wheels[name].manifest, [gpu.capability for gpu in group.gpus], system)
        requirements = {
            wheel.requirement: repack.write(wheel.files, wheel.requirement, checked)
            for wheel in wheels.values()
        }
        files = {name: len(one) for wheel in wheels.values() for name, one in wheel.files.items()}
        destination.require_room(sum(files.values()))
        if chosen.dry_run:
            print(f"would install {_listed(requirements)} into {sys.prefix}; nothing was changed")
            return 0
        with destination.without_remains(files):
            tool.install(list(requirements.values()), checked)
    _check_found(requirements)
    print(f"installed {_listed(requirements)} into {sys.prefix}; `flashvar doctor` shows what runs")
    return 0


def _groups_of_names(text: str, known: tuple[WheelRequirement, ...]) -> list[GpuGroup]:
    """The groups of GPUs that `--arch` names.

    Raises:
        ConfigurationError: a word is no architecture.
        NoWheelForGpuError: no binary is made for one of them.
    """
    groups = []
    for kind in wheel_requirements.kinds_of(text, known):
        capability = kind.architecture.capability
        fitting = [
            one
            for one in wheel_requirements.running_on(capability, known)
            if one.kind.cuda == kind.cuda
        ]
        if not fitting:
            raise NoWheelForGpuError(
                f"--arch: expected a GPU that a binary is made for, found {kind.extra}; nothing "
                "was installed: leave it out, and it uses Triton where it can "
                f"({wheel_requirements.describe(known)})"
            )
        groups.append(GpuGroup([Gpu("a GPU", capability)], fitting[0]))
    return groups


def _groups_of_machine(
    gpus: Sequence[Gpu], system: System, known: tuple[WheelRequirement, ...]
) -> list[GpuGroup]:
    """The groups of the GPUs of this machine; those without a binary are reported.

    Raises:
        NoWheelForGpuError: there is no GPU, or none has a binary.
        DriverTooOldError: the driver is too old for all binaries of one.
    """
    if not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "no NVIDIA driver" if system.driver_cuda is None else "none that the driver shows"
        why += "" if hidden is None else f", CUDA_VISIBLE_DEVICES={hidden!r}"
        raise NoWheelForGpuError(
            f"expected an NVIDIA GPU, found {why}; nothing was installed: to build an image for "
            f"another machine, name its GPU with --arch ({wheel_requirements.describe(known)})"
        )
    alike: dict[tuple[int, int], list[Gpu]] = {}
    for gpu in gpus:
        alike.setdefault(gpu.capability, []).append(gpu)
    groups, without = [], []
    for capability, same in alike.items():
        fitting = wheel_requirements.running_on(capability, known)
        if same[0].integrated and is_tegra():
            fitting = tuple(one for one in fitting if one.architecture.capability == capability)
        if fitting:
            groups.append(GpuGroup(same, _best(fitting, same, system)))
        else:
            without.append(_words(same))
    if not groups:
        raise NoWheelForGpuError(
            f"expected a GPU that a binary is made for, found {', '.join(without)}; nothing was "
            f"installed: it uses Triton where it can ({wheel_requirements.describe(known)})"
        )
    for words in without:
        print(f"no binary for {words}: it uses Triton where it can")
    return groups


def _best(
    fitting: Sequence[WheelRequirement], gpus: Sequence[Gpu], system: System
) -> WheelRequirement:
    """The first wheel whose code the driver loads, by its name: nothing is fetched in vain.

    Raises:
        DriverTooOldError: it loads none of them.
    """
    for requirement in fitting:
        if requirement.kind.runs_with(system.driver_cuda):
            return requirement
    oldest = min(requirement.kind.cuda for requirement in fitting)
    raise DriverTooOldError(
        f"expected driver {driver.BRANCHES[oldest, 0]} or newer (CUDA {oldest}) "
        f"for {_words(gpus)}, found {driver_text(system)}; nothing was installed: update the "
        "NVIDIA driver"
    )


def _of_environment() -> Inventory:
    """The binaries of this environment, to which those that FLASHVAR_LIB_DIR names do not belong.

    They would replace those of the environment too.
    """
    return registry.list_binaries(registry.folders(environ={}))


def _is_usable(binary: Binary, system: System | None) -> bool:
    """Whether a binary is whole, of this version, and the driver loads it."""
    if binary.version_mismatch is not None:
        return False
    try:
        loader.check_file(binary)
    except BinaryError:
        return False
    return system is None or driver_rejection(binary.manifest.minimum_driver, system) is None


def _fetch(group: GpuGroup, where: WheelSource, tool: Installer, folder: Path) -> Wheel:
    """Fetch a wheel, and check that its files are those of its RECORD and its manifest.

    Raises:
        WheelNotFoundError: the source does not have it.
        DamagedWheelError: it is not what it lists.
    """
    requirement = group.requirement
    print(f"fetching {requirement} from {where} for {_words(group.gpus)}", flush=True)
    fetched = tool.fetch(requirement, where, folder / requirement.distribution)
    files = record.read(fetched.tree, requirement)
    manifest = check_wheel.contents(fetched.tree, files, requirement)
    size = f"{manifest.library.bytes / _MEGABYTE:.1f} MB unpacked"
    driver = manifest.minimum_driver.display
    print(f"  {fetched.file}, {size}, for driver {driver} or newer")
    if fetched.withdrawn is not None:
        sys.stdout.flush()
        print(
            f"warning: {requirement} was withdrawn by its publisher: {fetched.withdrawn}; install "
            "another version of flashvar, then its binary",
            file=sys.stderr,
        )
    return Wheel(requirement, files, manifest)


def _check_found(installed: Iterable[WheelRequirement]) -> None:
    """Check that the loader finds what was installed."""
    importlib.invalidate_caches()
    registry.installed.cache_clear()
    inventory = _of_environment()
    found = {binary.manifest.distribution for binary in inventory.binaries}
    lost = [str(requirement) for requirement in installed if requirement.distribution not in found]
    if lost:
        reasons = [one.reason for one in inventory.rejected] or ["the installer put it elsewhere"]
        raise InstallError(
            f"expected to find {', '.join(lost)} after it was installed, found none "
            f"({reasons[0]}): `flashvar doctor` lists what is found"
        )


def _words(gpus: Sequence[Gpu]) -> str:
    """`2 x NVIDIA H100 (9.0)`."""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    times = f"{len(gpus)} x " if len(gpus) > 1 else ""
    return f"{times}{names} ({dotted(gpus[0].capability)})"


def _listed(requirements: Mapping[WheelRequirement, str]) -> str:
    """The wheels, each in the version that it has: with its label."""
    return ", ".join(one.partition(" ")[0] for one in requirements.values())
