"""Compiling Triton's kernels for a device that is not here."""

from __future__ import annotations

from typing import Any


def pretend(capability: tuple[int, int]) -> None:
    """Make Triton compile for a capability; it asks its driver for nothing else.

    Afterwards this process can start no kernel of Triton's.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    number = 10 * capability[0] + capability[1]

    class Absent:
        """The driver of a device that is not here."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", number, 32)

        def get_current_device(self) -> str:
            return f"sm_{number}"  # Triton keeps apart by it what it has compiled

        def get_current_stream(self, device: str) -> int:
            return 0

    driver.set_active(Absent())
