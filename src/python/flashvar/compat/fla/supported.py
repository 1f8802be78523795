"""Which calls of flash-linear-attention's functions flashvar supports."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from flashvar.errors import BackendUnavailableError

__all__ = ["parameters_of", "require", "unsupported_option"]

# Parameters that exist to be refused: context parallelism, and gates of keys and of values.
_REFUSED: Final = frozenset(("cp_context", "gk", "gv"))
_DEVICES: Final = ("cpu", "cuda", "meta")


def parameters_of(*functions: Callable[..., Any]) -> frozenset[str]:
    """The parameters that the functions support."""
    parameters = [one for f in functions for one in inspect.signature(f).parameters.values()]
    return frozenset(x.name for x in parameters if x.kind is not x.VAR_KEYWORD) - _REFUSED


def unsupported_option(
    options: dict[str, Any], supported: frozenset[str], tensor: torch.Tensor
) -> str | None:
    """Why a call with these options on the device of a tensor is not supported; None if it is."""
    if tensor.device.type not in _DEVICES:
        return f"the tensors are on {tensor.device.type}"
    for name, value in options.items():
        if name not in supported and value is not None:
            return f"{name} is given"
    return None


def require(function: str, reason: str | None) -> None:
    """Refuse a call for a reason.

    Raises:
        BackendUnavailableError: there is one.
    """
    if reason is not None:
        raise BackendUnavailableError(
            f"{function}: expected a call that flashvar supports, found that {reason}: leave it "
            "out, or call flash-linear-attention's own function"
        )
