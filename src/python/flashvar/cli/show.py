"""`flashvar show`: lists the installed binaries and the kernels in their manifests.

Opens no library and imports no framework.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from flashvar._version import __version__
from flashvar.binaries import loader
from flashvar.binaries.kinds import BinaryKind, Kernel, dotted
from flashvar.binaries.manifest import KernelRow, Toolkit
from flashvar.binaries.registry import Binary, Inventory, RejectedFolder
from flashvar.cli import screen
from flashvar.cli.page import BAD, GOOD, Page, Row, Section, Table, counted, rows
from flashvar.errors import ConfigurationError

_SCHEMA = 1


def run(named: Sequence[str], *, as_json: bool) -> int:
    """Print the binaries of the named architectures, or all; returns 1 if there are none.

    Raises:
        ConfigurationError: a name is not an architecture.
    """
    installed = loader.whole()
    inventory = _only(installed, named)
    if as_json:
        print(json.dumps(_document(inventory), indent=1))
    else:
        others = [one.kind.name for one in installed.binaries] if named else []
        screen.show(page(inventory, others))
    return 0 if inventory.binaries else 1


def page(inventory: Inventory, others: Sequence[str] = ()) -> Page:
    """The page; `others` are installed architectures that were not named."""
    kernels = sum(len(binary.manifest.kernels) for binary in inventory.binaries)
    many = len(inventory.binaries)
    summary = f"{counted(many, 'binary', 'binaries')}, {counted(kernels, 'kernel')}."
    nothing = (
        f"None of them is installed. Installed: {', '.join(others)}."
        if others
        else "No binary is installed."
    )
    return Page(
        summary=summary if many else nothing,
        tone=GOOD if many else BAD,
        sections=(
            Section("Binaries", tuple(_binary(one) for one in inventory.binaries)),
            *(_rejected(inventory.rejected),) * bool(inventory.rejected),
            *(_kernels(one) for one in inventory.binaries),
        ),
        commands_title="" if many else "To see what this machine needs",
        commands=() if many else ("flashvar doctor",),
    )


def _only(inventory: Inventory, named: Sequence[str]) -> Inventory:
    try:
        wanted = {BinaryKind.parse(one) for one in named}
    except ValueError as error:
        raise ConfigurationError(
            f"show: {error}; `flashvar show` alone lists what is installed"
        ) from None
    if not wanted:
        return inventory
    names = {one.name for one in wanted}
    binaries = tuple(
        one for one in inventory.binaries if names & {one.kind.name, one.architecture.name}
    )
    rejected = tuple(one for one in inventory.rejected if one.kind in names)
    return Inventory(binaries, rejected, inventory.extras)


def _binary(binary: Binary) -> Table:
    manifest = binary.manifest
    driver = manifest.minimum_driver
    source = (manifest.source.revision or "unknown")[:12]
    facts = [
        ("library", str(binary.library)),
        ("from", binary.folder.origin),
        (
            "version",
            manifest.version + (f" ({binary.version_mismatch})" if binary.version_mismatch else ""),
        ),
        ("code", f"{binary.architecture.code}, {' and '.join(manifest.code_kinds)}"),
        ("toolkit", _toolkit(manifest.toolkit)),
        ("driver", f"{driver.display} or newer (CUDA {dotted(driver.cuda)})"),
        ("size", f"{manifest.library.bytes / 1e6:.1f} MB"),
        ("source", source + (", with uncommitted changes" if manifest.source.dirty else "")),
    ]
    return Table(rows(facts), caption=binary.kind.name)


def _toolkit(toolkit: Toolkit) -> str:
    made = f", machine code by ptxas {toolkit.ptxas}" if toolkit.ptxas else ""
    return f"{toolkit.compiler} {toolkit.version}{made}"


def _rejected(rejected: Sequence[RejectedFolder]) -> Section:
    found = [
        (str(one.folder.path), one.reason + (f" -> {one.fix}" if one.fix else ""))
        for one in rejected
    ]
    return Section("Not used", (Table(rows(found, BAD), ("folder", "reason")),))


def _kernels(binary: Binary) -> Section:
    held = binary.manifest.kernels
    tables = tuple(
        _table([row for row in held if row.function == function], function)
        for function in dict.fromkeys(row.function for row in held)
    )
    notes = (_OF_SEVERAL,) if any(len(row.rules) > 1 for row in held) else ()
    return Section(f"Kernels of {binary.kind.name}", tables, notes=notes)


_OF_SEVERAL = (
    "family and facts are those of the kernel for plain calls; `flashvar doctor` shows which calls "
    "take another family."
)
_HEADING = ("dtypes", "family", "tile", "threads", "regs", "shared", "spills")
_NUMBERS = (3, 4, 5, 6)


def _table(held: Sequence[KernelRow], function: str) -> Table:
    """The kernels of one function, with a column for each axis."""
    axes = tuple(dict.fromkeys(axis for row in held for axis in row.values))
    heading = (*(axis.replace("_", " ") for axis in axes), *_HEADING)
    numbers = frozenset(len(axes) + number for number in _NUMBERS)
    return Table(tuple(_rows(held, axes)), heading, function, numbers)


def _rows(held: Sequence[KernelRow], axes: tuple[str, ...]) -> Iterator[Row]:
    """One row per group of kernels that differ only in dtype."""
    dtypes_of: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for row in held:
        values = Kernel(row.function, row.axes).values
        key = tuple(values.get(axis, "-") for axis in axes), _facts(row)
        dtypes_of.setdefault(key, []).append(row.dtype or "-")
    for (values_of, facts), dtypes in dtypes_of.items():
        yield Row((*values_of, ", ".join(dtypes), *facts))


def _facts(row: KernelRow) -> tuple[str, ...]:
    return (
        row.rules[0].family if row.rules else row.family,
        "x".join(map(str, row.tile)),
        str(row.threads),
        str(row.registers),
        f"{row.shared_memory / 1024:.1f} KiB",
        f"{row.spill_bytes} B" if row.spill_bytes else "-",
    )


def _document(inventory: Inventory) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "version": __version__,
        "binaries": [_binary_to_json(binary) for binary in inventory.binaries],
        "rejected": [
            {
                "kind": one.kind,
                "origin": one.folder.origin,
                "directory": str(one.folder.path),
                "reason": one.reason,
                "fix": one.fix,
            }
            for one in inventory.rejected
        ],
    }


def _binary_to_json(binary: Binary) -> dict[str, Any]:
    """The manifest, with the path of the library and the instruction families of every kernel."""
    document = json.loads(binary.manifest.to_json())
    kernels = [
        {**written, "families": [asdict(rule) for rule in row.rules]}
        for row, written in zip(binary.manifest.kernels, document["kernels"], strict=True)
    ]
    return {
        "origin": binary.folder.origin,
        "library_path": str(binary.library),
        "version_mismatch": binary.version_mismatch,
        "manifest": {**document, "kernels": kernels},
    }
