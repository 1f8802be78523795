"""`flashvar install`: brings the binaries of this machine's GPUs into this environment."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashvar.binaries import registry
from flashvar.binaries.manifest import Manifest
from flashvar.binaries.registry import Binary
from flashvar.errors import DriverError, InstallError, SourceError, UnservedDeviceError
from flashvar.installing import installer, offers, record, repacked, source, temporary, verify
from flashvar.installing.installer import Installer
from flashvar.installing.offers import Offer
from flashvar.installing.source import Source
from flashvar.machine import driver
from flashvar.machine.driver import Gpu
from flashvar.machine.system import System, is_tegra, platform_tag
from flashvar.selection.compatibility import dotted

_MEGABYTE = 1_000_000

Wheel = tuple[Mapping[str, bytes], Manifest]  # its files, and what they say of themselves


@dataclass(frozen=True)
class Machine:
    """What is installed for: the GPUs here under their driver, or those that were named."""

    gpus: tuple[Gpu, ...]
    system: System | None  # of the driver; None: the GPUs are in another machine


def run(chosen: argparse.Namespace, *, machine: Machine | None = None) -> int:
    """Fetch, judge and install what is missing; returns the exit code.

    Raises:
        InstallError: nothing was installed, or not everything; its class says which kind.
    """
    offered = offers.of_installed(platform_tag())
    machine = machine or _machine(chosen.arch, offered)
    needs = _needs(machine, offered)
    missing = {gpus: mine for gpus, mine in needs.items() if not _is_present(mine, machine.system)}
    for gpus in needs:
        if gpus not in missing:
            print(f"installed already: the binary for {_words(gpus)}")
    if not missing:
        return 0
    first = next(iter(missing.values()))[0]
    where = source.find(chosen.source, os.environ, architecture=first.architecture.extra)
    tool = installer.find(os.environ)
    with temporary.folder() as folder:
        judged = folder / "judged"
        known: dict[str, Wheel] = {}
        fetched = {
            offer.distribution: (offer, files)
            for gpus, mine in missing.items()
            for offer, files in _fetch(gpus, mine, machine.system, where, tool, folder, known)
        }
        requirements = {
            offer: repacked.write(files, offer, judged) for offer, files in fetched.values()
        }
        if not requirements:
            return 0
        if chosen.dry_run:
            print(f"would install {_listed(requirements)} into {sys.prefix}; nothing was changed")
            return 0
        tool.install(list(requirements.values()), judged)
    _check_found(requirements)
    print(f"installed {_listed(requirements)} into {sys.prefix}; `flashvar doctor` shows what runs")
    return 0


def _machine(named: str | None, offered: tuple[Offer, ...]) -> Machine:
    if named is not None:
        capabilities = offers.named(named, offered)
        return Machine(tuple(Gpu("a GPU", one) for one in capabilities), None)
    gpus = driver.gpus()
    system = System(driver_cuda=driver.cuda_version(), driver_display=driver.display_version())
    if not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "no NVIDIA driver" if system.driver_cuda is None else "none that the driver shows"
        why += "" if hidden is None else f", CUDA_VISIBLE_DEVICES={hidden!r}"
        raise UnservedDeviceError(
            f"expected an NVIDIA GPU, found {why}; nothing was installed: for an image that runs "
            f"elsewhere name its GPU with --arch ({offers.of_words(offered)})"
        )
    return Machine(gpus, system)


def _needs(
    machine: Machine, offered: tuple[Offer, ...]
) -> dict[tuple[Gpu, ...], tuple[Offer, ...]]:
    """The offers for the GPUs of each capability, the best first; unserved ones are reported.

    Raises:
        UnservedDeviceError: none of them is served, or one is not that was named.
    """
    alike: dict[tuple[int, int], list[Gpu]] = {}
    for gpu in machine.gpus:
        alike.setdefault(gpu.capability, []).append(gpu)
    found: dict[tuple[Gpu, ...], tuple[Offer, ...]] = {}
    unserved = []
    for capability, same in alike.items():
        served = offers.serving(capability, offered)
        if same[0].integrated and is_tegra():
            served = tuple(one for one in served if one.architecture.capability == capability)
        if served:
            found[tuple(same)] = served
        else:
            unserved.append(_words(same))
    if not found or (unserved and machine.system is None):
        raise UnservedDeviceError(
            f"expected a GPU that a binary is made for, found {', '.join(unserved)}; nothing was "
            f"installed, Triton serves it where it can ({offers.of_words(offered)})"
        )
    for words in unserved:
        print(f"no binary for {words}: Triton serves it where it can")
    return found


def _is_present(mine: Sequence[Offer], system: System | None) -> bool:
    """Whether a binary of the best architecture is installed, in this version, that can be loaded.

    One that FLASHVAR_LIB_DIR names does not count: it is not of this environment.
    """
    return any(
        binary.architecture.capability == mine[0].architecture.capability
        for binary in _usable(system)
    )


def _is_installed(offer: Offer, system: System | None) -> bool:
    return any(one.manifest.distribution == offer.distribution for one in _usable(system))


def _usable(system: System | None) -> list[Binary]:
    """The binaries of this environment, in this version, that the driver loads."""
    return [
        binary
        for binary in registry.installed().binaries
        if binary.skew is None
        and not binary.candidate.named
        and _misfit(binary.manifest, [], system) is None
    ]


def _misfit(
    manifest: Manifest, capabilities: Sequence[tuple[int, int]], system: System | None
) -> InstallError | None:
    try:
        verify.fits(manifest, capabilities, system)
    except (DriverError, UnservedDeviceError) as error:
        return error
    return None


def _fetch(
    gpus: Sequence[Gpu],
    mine: Sequence[Offer],
    system: System | None,
    where: Source,
    tool: Installer,
    folder: Path,
    known: dict[str, Wheel],
) -> Iterator[tuple[Offer, Mapping[str, bytes]]]:
    """The first offer that fits, with the files of its wheel: fetched, and judged.

    What other GPUs were served by is `known`, by distribution, and not fetched again.

    Raises:
        SourceError: the source does not have the best one, or any.
        IntegrityError: a wheel is not what its RECORD and its manifest list.
        DriverError: the driver is too old for each of them.
        UnservedDeviceError: the code of none of them runs there.
    """
    misfit: InstallError | None = None
    missing: SourceError | None = None
    for offer in mine:
        if misfit is not None and _is_installed(offer, system):
            print(f"installed already: {offer}, for {_words(gpus)}")
            return
        try:
            if offer.distribution not in known:
                known[offer.distribution] = _judged(offer, gpus, where, tool, folder)
        except SourceError as error:
            # Why the best one does not fit says more than that another is not there. One that is
            # made for this driver is wanted whether or not the best one is there.
            if misfit is None and not _has_one_for_driver(mine, system):
                raise
            missing = missing or error
            print(f"  passed over: {error}")
            continue
        files, manifest = known[offer.distribution]
        found = _misfit(manifest, [gpu.capability for gpu in gpus], system)
        if found is None:
            yield offer, files
            return
        print(f"  passed over: {found}")
        # That a driver is too old says more than that older code does not run either.
        misfit = misfit if isinstance(misfit, DriverError) else found
    reason = misfit or missing
    assert reason is not None
    raise reason


def _judged(
    offer: Offer, gpus: Sequence[Gpu], where: Source, tool: Installer, folder: Path
) -> Wheel:
    print(f"fetching {offer} from {where} for {_words(gpus)}", flush=True)
    fetched = tool.fetch(offer, where, folder / offer.distribution)
    files = record.read(fetched.tree, offer)
    manifest = verify.contents(fetched.tree, files, offer)
    said = f"{fetched.file}, {manifest.library.bytes / _MEGABYTE:.1f} MB unpacked"
    print(f"  {said}, for driver {manifest.minimum_driver.display} or newer")
    return files, manifest


def _has_one_for_driver(mine: Iterable[Offer], system: System | None) -> bool:
    if system is None or system.driver_cuda is None:
        return False
    return any(offer.cuda == system.driver_cuda[0] for offer in mine)


def _check_found(installed: Iterable[Offer]) -> None:
    """Whether the loader finds what was installed."""
    importlib.invalidate_caches()
    registry.installed.cache_clear()
    inventory = registry.installed()
    found = {binary.manifest.distribution for binary in inventory.binaries}
    lost = [str(offer) for offer in installed if offer.distribution not in found]
    if lost:
        reasons = [one.reason for one in inventory.refusals] or ["the installer put it elsewhere"]
        raise InstallError(
            f"expected to find {', '.join(lost)} after it was installed, found none "
            f"({reasons[0]}): `flashvar doctor` lists what is found"
        )


def _words(gpus: Sequence[Gpu]) -> str:
    """`2 x NVIDIA H100 (9.0)`."""
    names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    times = f"{len(gpus)} x " if len(gpus) > 1 else ""
    return f"{times}{names} ({dotted(gpus[0].capability)})"


def _listed(chosen: Iterable[Offer]) -> str:
    return ", ".join(map(str, chosen))
