"""Judges a wheel that was fetched and unpacked, before it is installed."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Sequence
from pathlib import Path

from flashvar.binaries import registry
from flashvar.binaries.advice import public
from flashvar.binaries.manifest import Manifest
from flashvar.binaries.registry import Candidate
from flashvar.errors import DriverError, IntegrityError, UnservedDeviceError
from flashvar.installing.offers import Offer
from flashvar.machine.system import System
from flashvar.selection.compatibility import dotted, driver_rejection


def contents(tree: Path, offer: Offer) -> Manifest:
    """The manifest of an unpacked wheel whose files all have the hashes of its RECORD.

    Raises:
        IntegrityError: a file is missing or changed, or this is another wheel.
    """
    folder = offer.distribution.replace("-", "_")
    _check_record(tree, folder, offer)
    candidate = Candidate(tree / folder, str(offer), "fetch it again")
    inventory = registry.take_stock([candidate])
    for refusal in inventory.refusals:
        raise IntegrityError(f"{offer}: {refusal.reason}; nothing was installed: fetch it again")
    (binary,) = inventory.binaries
    manifest = binary.manifest
    said = (manifest.distribution, public(manifest.version), manifest.library.sha256)
    digest = hashlib.sha256(binary.library.read_bytes()).hexdigest()
    if said != (offer.distribution, public(offer.version), digest):
        raise IntegrityError(
            f"{offer}: expected its manifest to describe it, found {' '.join(said)} there and a "
            f"library of {digest}; nothing was installed: fetch it again"
        )
    return manifest


def _check_record(tree: Path, folder: str, offer: Offer) -> None:
    records = list(tree.glob(f"{folder}-*.dist-info/RECORD"))
    if len(records) != 1:
        raise IntegrityError(f"{offer}: expected one RECORD in its wheel, found {len(records)}")
    with records[0].open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if len(row) == 3 and row[1]]
    for name, listed, _ in rows:
        algorithm, _, digest = listed.partition("=")
        try:
            content = (tree / name).read_bytes()
            found = hashlib.new(algorithm, content).digest()
        except (OSError, ValueError) as error:
            raise IntegrityError(f"{offer}: expected {name} in its wheel, found {error}") from error
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != digest:
            raise IntegrityError(
                f"{offer}: expected {name} to have the hash of its RECORD, found other bytes; "
                "nothing was installed: fetch it again"
            )


def fits(
    manifest: Manifest, capabilities: Sequence[tuple[int, int]], system: System | None
) -> None:
    """Whether a binary runs on devices; with `system`, under its driver.

    Raises:
        UnservedDeviceError: its machine code does not run on one of them.
        DriverError: the driver is too old for it.
    """
    for capability in capabilities:
        if not manifest.architecture.runs_on(capability):
            raise UnservedDeviceError(
                f"{manifest.distribution}: expected machine code for {dotted(capability)}, found "
                f"code for {manifest.architecture.code}"
            )
    rejection = None if system is None else driver_rejection(manifest, system)
    if rejection is not None:
        raise DriverError(f"{manifest.distribution} {rejection.reason}: {rejection.fix}")
