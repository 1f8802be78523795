"""This machine: its processor, its GPUs, and the architectures to build for them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Final

from flashvar.errors import ConfigurationError
from flashvar.machine import driver
from flashvar_factory.config.schema import Config
from flashvar_factory.config.suggestions import listed

Capability = tuple[int, int]

# The processor of this machine, in the words of wheel tags: "x86_64", "aarch64".
PROCESSOR: Final = platform.machine()


def capabilities() -> tuple[Capability, ...]:
    """The compute capability of each CUDA device, in the driver's order; () without one."""
    return tuple(gpu.capability for gpu in driver.gpus())


def resolve(found: Sequence[Capability], config: Config) -> tuple[str, ...]:
    """The architectures of `config` that the devices run; the [dev] default without a device.

    A device runs its own architecture, else the highest lower minor of the same major.
    ConfigurationError when the devices run none.
    """
    if not found:
        return (config.dev.architecture,)
    names = [name for one in found if (name := _best_for(one, config))]
    if not names:
        devices = listed(f"{major}.{minor}" for major, minor in found)
        raise ConfigurationError(
            f"arch=native: expected a GPU that code for {listed(config.targets)} runs on, found "
            f"compute capability {devices}; name an architecture (arch=...) or add one to "
            "variants.toml"
        )
    return tuple(dict.fromkeys(names))


def _best_for(capability: Capability, config: Config) -> str | None:
    targets = (target for target in config.targets.values() if target.toolkit is None)
    candidates = [one.architecture for one in targets if one.architecture.runs_on(capability)]
    return max(candidates).name if candidates else None
