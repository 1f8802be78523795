"""flash-linear-attention's question whether a device has shared memory enough."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from flashvar.machine.shared_memory import SHARED_MEMORY, of_device

__all__ = ["check_shared_mem"]

_NEEDED: Final = MappingProxyType(
    {
        "ada": SHARED_MEMORY[8, 9],
        "ampere": SHARED_MEMORY[8, 0],
        "hopper": SHARED_MEMORY[9, 0],
    }
)
_OTHERWISE: Final = 100 << 10


def check_shared_mem(arch: str = "none", tensor_idx: int = 0) -> bool:
    """Whether a block on `cuda:tensor_idx` may use as much shared memory as on an architecture.

    These are "ada", "ampere" (the A100) and "hopper"; of other names it is 100 KiB. It never
    raises: without a device the answer is False.
    """
    return of_device(tensor_idx) >= _NEEDED.get(arch.lower(), _OTHERWISE)
