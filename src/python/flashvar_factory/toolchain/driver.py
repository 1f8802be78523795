"""The oldest driver that runs a binary."""

from __future__ import annotations

from typing import Final

from flashvar.binaries.manifest import MinimumDriver
from flashvar.machine.driver import BRANCHES

# Compression of device code -> the oldest CUDA version whose drivers uncompress it. lz4 is older
# than any driver supported here.
OPENS: Final = {"zstd": (12, 4)}


def minimum(toolkit: tuple[int, int], code_kinds: tuple[str, ...]) -> MinimumDriver:
    """The oldest driver that runs what `toolkit` (major, minor) compiled.

    Machine code runs from the toolkit's major version on (minor version compatibility); PTX is
    compiled by the driver, which must know the toolkit's own version of it.
    """
    cuda = toolkit if "ptx" in code_kinds else (toolkit[0], 0)
    known = max(version for version in BRANCHES if version <= cuda)
    return MinimumDriver(cuda, BRANCHES[known])
