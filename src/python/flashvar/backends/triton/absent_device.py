"""Compiles Triton kernels for a GPU that is not in this machine."""

from __future__ import annotations

from typing import Any


def set_target(capability: tuple[int, int]) -> None:
    """Make Triton compile for a capability, through a driver that answers nothing else.

    Afterwards this process cannot launch Triton kernels.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    number = 10 * capability[0] + capability[1]

    class Absent:
        """The driver of a GPU that is not in this machine."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", number, 32)

        def get_current_device(self) -> str:
            return f"sm_{number}"  # Triton's key for the kernels it has compiled

        def get_current_stream(self, device: str) -> int:
            return 0

    driver.set_active(Absent())
