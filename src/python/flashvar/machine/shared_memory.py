"""Bytes of shared memory that a block may use, by capability and of a device.

Those by capability are from the CUDA C++ programming guide, table of technical specifications, less
the 1 KiB per block that the system reserves.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flashvar.machine.system import gather

SHARED_MEMORY: Final = MappingProxyType(
    {
        (7, 5): 64 << 10,
        (8, 0): 163 << 10,
        (8, 6): 99 << 10,
        (8, 7): 163 << 10,
        (8, 9): 99 << 10,
        (9, 0): 227 << 10,
        (10, 0): 227 << 10,
        (10, 3): 227 << 10,
        (11, 0): 227 << 10,
        (12, 0): 99 << 10,
        (12, 1): 99 << 10,
    }
)


def of_device(index: int = 0) -> int:
    """Bytes that a block may opt in to on torch's `cuda:index`; 0 where there is no such device."""
    device = gather().device(index)
    return 0 if device is None else device.shared_memory
