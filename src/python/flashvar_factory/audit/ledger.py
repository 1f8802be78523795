"""The bytes of a wheel by kernel: one row per (architecture, function, axes)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashvar.binaries.manifest import KernelRow
from flashvar_factory.audit.facts import Image, Library, Wheel
from flashvar_factory.audit.manifests import pairs
from flashvar_factory.inspect.fatbin import PTX


class Key(NamedTuple):
    """What the bytes are spent on."""

    architecture: str  # "sm_90a", "compute_90" of PTX; "host" for all that is not device code
    kind: str  # "sass", "ptx", "host"
    function: str | None  # None where nothing says whose they are
    axes: tuple[tuple[str, str | int], ...]  # (("dtype", "bf16"), ("head_dim", 64))


@dataclass
class Row:
    """The sizes of one key."""

    stored: int = 0  # in the library, compressed as it is there
    code: int = 0  # of the machine code of kernels, uncompressed
    kernels: int = 0  # device functions


def ledger(wheel: Wheel) -> dict[Key, Row]:
    """The whole of the libraries: the stored bytes add up to their sizes."""
    rows: dict[Key, Row] = defaultdict(Row)
    by_path = {library.path: manifest for library, manifest in pairs(wheel)}
    for library in wheel.libraries:
        manifest = by_path.get(library.path)
        kernels = [(row, frozenset(row.functions)) for row in manifest.kernels] if manifest else []
        for image in library.images:
            for key, share in _shares(image, _owners(image, kernels)):
                row = rows[key]
                row.stored += share.stored
                row.code += share.code
                row.kernels += share.kernels
        rows[Key("host", "host", None, ())].stored += library.size - _device_bytes(library)
    return dict(sorted(rows.items(), key=lambda item: _order(item[0])))


def _owners(
    image: Image, kernels: Sequence[tuple[KernelRow, frozenset[str]]]
) -> dict[str, KernelRow]:
    """The kernel that each function of an image belongs to; a shared one to that which has all."""
    held = {function.name for function in image.functions or ()}
    last = sorted(kernels, key=lambda kernel: held <= kernel[1])
    return {name: row for row, functions in last for name in held & functions}


def _shares(image: Image, owners: dict[str, KernelRow]) -> Iterator[tuple[Key, Row]]:
    """An image's bytes, divided among the kernels it belongs to by the size of their code."""
    code: dict[Key, Row] = {}
    for function in image.functions or ():
        owner = owners.get(function.name)
        key = _key(image, owner)
        row = code.setdefault(key, Row())
        row.code += function.size
        row.kernels += 1
    if not code:
        yield _key(image, None), Row(stored=image.stored_bytes)
        return
    total, given, passed = sum(row.code for row in code.values()), 0, 0
    for key, row in code.items():
        passed += row.code
        share = image.stored_bytes * passed // total if total else image.stored_bytes
        row.stored, given = share - given, share
        yield key, row


def _key(image: Image, owner: KernelRow | None) -> Key:
    function, axes = (owner.function, owner.axes) if owner else (None, ())
    prefix = "compute" if image.kind == PTX else "sm"
    return Key(f"{prefix}_{image.code}", image.kind, function, axes)


def _device_bytes(library: Library) -> int:
    return sum(image.stored_bytes for image in library.images)


def _order(key: Key) -> tuple[bool, str, str, str, tuple[tuple[str, int, str], ...]]:
    axes = tuple(
        (name, value if isinstance(value, int) else 0, str(value)) for name, value in key.axes
    )
    return key.kind == "host", key.architecture, key.kind, key.function or "", axes
