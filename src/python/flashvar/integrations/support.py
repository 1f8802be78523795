"""Whether a backend of flashvar supports a kind of call on this machine.

Answers are cached per kind of call, so integrations can ask at every call. As in
`flashvar.selection`, a backend that was chosen stays, and a refusal is only kept for the values of
the environment variables that led to it.
"""

from __future__ import annotations

from typing import Any

import torch

from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention.spec import BACKWARD, FORWARD, HEAD_DIM_STEP
from flashvar.ops.attention.validate import KERNEL_DTYPES
from flashvar.ops.dtypes import DTYPES
from flashvar.selection.request import Overrides, Request
from flashvar.selection.resolve import choose

__all__ = ["explicit_backend", "unsupported"]

# Of a kind that no backend can run: the settings at that time, and the reason.
_kept: dict[tuple[Any, ...], tuple[Overrides, str] | None] = {}


def unsupported(
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    head_dim_v: int,
    backward: bool,
    backend: str,
) -> str | None:
    """Why no backend can run attention of such tensors on this machine; None if one can."""
    key = (dtype, device, head_dim, head_dim_v, backward, backend)
    try:
        kept = _kept[key]
    except KeyError:
        kept = None
    else:
        if kept is None:
            return None
    overrides = Overrides.from_environment(backend)
    if kept is None or kept[0] != overrides:
        reason = _reason(*key)
        kept = _kept[key] = None if reason is None else (overrides, reason)
    return None if kept is None else kept[1]


# torch.compile calls the function at trace time and treats the result as a constant. This is what
# torch.compiler.assume_constant_result sets, without importing the compiler.
unsupported._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _reason(
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    head_dim_v: int,
    backward: bool,
    backend: str,
) -> str | None:
    name = DTYPES.get(dtype)
    if name is None:
        return f"flashvar does not support {dtype}"
    if device.type not in ("cpu", "cuda"):
        return f"flashvar runs on CUDA devices and the CPU, not {device.type}"
    dims, index = (head_dim, head_dim_v), None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if name not in KERNEL_DTYPES and explicit_backend(backend) != "reference":
            return f"flashvar takes bfloat16 and float16 on a CUDA device, not {dtype}"
        # flashvar.attention pads head dims to the step of the kernels.
        head_dim, head_dim_v = (dim + -dim % HEAD_DIM_STEP for dim in dims)
    for function in (FORWARD, BACKWARD) if backward else (FORWARD,):
        try:
            choose(Request(function, name, index, ((head_dim, head_dim_v),)), backend)
        except BackendUnavailableError as error:
            return str(error)
    return None


def explicit_backend(backend: str) -> str:
    """The backend that the caller or FLASHVAR_BACKEND names; "auto" if neither does."""
    return Overrides.from_environment(backend).backend
