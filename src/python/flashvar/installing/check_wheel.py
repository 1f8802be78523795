"""Checks a wheel that was fetched and unpacked, before it is installed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashvar.binaries import registry
from flashvar.binaries.install_commands import public
from flashvar.binaries.kinds import dotted
from flashvar.binaries.manifest import Manifest
from flashvar.errors import DamagedWheelError, DriverTooOldError, NoWheelForGpuError
from flashvar.installing.wheel_requirements import WheelRequirement
from flashvar.machine.system import System
from flashvar.selection.compatibility import driver_rejection


def contents(tree: Path, files: Mapping[str, bytes], requirement: WheelRequirement) -> Manifest:
    """The manifest of an unpacked wheel, which describes the library that is beside it.

    Raises:
        DamagedWheelError: the loader would not find one binary there, or this is another wheel.
    """
    inventory = registry.list_binaries(registry.in_wheels([str(tree)]))
    for rejected in inventory.rejected:
        raise DamagedWheelError(
            f"{requirement}: {rejected.reason}; nothing was installed: fetch it again"
        )
    if len(inventory.binaries) != 1:
        raise DamagedWheelError(
            f"{requirement}: expected an entry point of one binary, found "
            f"{len(inventory.binaries)}; nothing was installed: fetch it again"
        )
    (binary,) = inventory.binaries
    manifest = binary.manifest
    described = (manifest.distribution, public(manifest.version), manifest.library.sha256)
    library = files.get(f"{requirement.folder}/{manifest.library.file}", b"")
    digest = hashlib.sha256(library).hexdigest()
    if described != (requirement.distribution, public(requirement.version), digest):
        raise DamagedWheelError(
            f"{requirement}: expected its manifest to describe it, found {' '.join(described)} "
            f"there and a library of {digest}; nothing was installed: fetch it again"
        )
    return manifest


def fits(
    manifest: Manifest, capabilities: Sequence[tuple[int, int]], system: System | None
) -> None:
    """Check that a binary runs on devices; with `system`, also under its driver.

    Raises:
        NoWheelForGpuError: its machine code does not run on one of them.
        DriverTooOldError: the driver is too old for it.
    """
    for capability in capabilities:
        if not manifest.architecture.runs_on(capability):
            raise NoWheelForGpuError(
                f"{manifest.distribution}: expected machine code for {dotted(capability)}, found "
                f"code for {manifest.architecture.code}"
            )
    rejection = None if system is None else driver_rejection(manifest.minimum_driver, system)
    if rejection is not None:
        raise DriverTooOldError(f"{manifest.distribution} {rejection.reason}: {rejection.fix}")
