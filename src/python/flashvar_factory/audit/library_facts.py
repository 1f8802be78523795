"""Reads from a library what it states of itself: its ABI, its build, its kernels' names."""

from __future__ import annotations

import re
from typing import Final

from flashvar.binaries.kinds import Kernel
from flashvar.binaries.manifest import KernelRow, Manifest
from flashvar_factory.audit.facts import Library

# What a compiler makes of `return N`, on each processor; the number's bytes or bits are the group.
_RETURNS: Final = {
    "x86_64": re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xb8(?P<number>.{4})\xc3", re.DOTALL),
    "aarch64": re.compile(rb"(?:.\x24\x03\xd5)?(?P<number>.{3}\x52)\xc0\x03\x5f\xd6", re.DOTALL),
}
_LONGEST: Final = 12
_CONSTANTS: Final = ".rodata"
_BUILD_INFO: Final = re.compile(
    rb'\{"architecture": "(?P<architecture>sm_\d{2,3})", "version": "(?P<version>[^"\0]{1,200})", '
    rb'"source_hash": "(?P<hash>[0-9a-f]{64})"\}\0'
)


def abi(library: Library, manifest: Manifest) -> int | None:
    """What `<project>_abi_version` returns; None where its code is not that of a constant."""
    name = f"{manifest.project}_abi_version"
    symbol = next((one for one in library.dynamic.symbols if one.name == name), None)
    pattern = _RETURNS.get(library.dynamic.machine)
    if symbol is None or pattern is None or not 0 < symbol.size <= _LONGEST:
        return None
    code = library.file.at_address(symbol.value, symbol.size)
    match = pattern.fullmatch(bytes(code)) if code is not None else None
    if match is None:
        return None
    number = int.from_bytes(match["number"], "little")
    return number if library.dynamic.machine == "x86_64" else number >> 5 & 0xFFFF


def build_info(library: Library) -> tuple[str, str, str] | None:
    """Architecture, version and source hash; None where the library has not one such text.

    It is among the constants, which its code returns.
    """
    found = list(_BUILD_INFO.finditer(library.file.data))
    homes = [(one.offset, one.offset + len(one.content)) for one in library.file.named(_CONSTANTS)]
    if len(found) != 1 or not any(
        start <= found[0].start() and found[0].end() <= stop for start, stop in homes
    ):
        return None
    architecture, version, digest = (part.decode(errors="replace") for part in found[0].groups())
    return architecture, version, digest


def kernel(row: KernelRow) -> Kernel:
    """The kernel of a manifest's row."""
    return Kernel(row.function, row.axes)
