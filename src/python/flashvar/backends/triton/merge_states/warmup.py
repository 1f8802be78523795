"""Compiling the Triton kernels of merge_states for a device that is not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashvar.backends.triton import merge_states
from flashvar.backends.triton.absent_device import set_target
from flashvar.backends.triton.begin import compile_only
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.merge_states.problem import Parts

if TYPE_CHECKING:
    from flashvar.ops.merge_states.warmup import Kind


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile the kernels of a kind of call; Triton finds them where there is such a device.

    Afterwards this process can start no kernel of Triton's.
    """
    set_target(capability)
    dtype = next(one for one, name in DTYPES.items() if name == kind.dtype)
    outs = torch.zeros(kind.parts, 1, 2, 2, kind.head_dim, dtype=dtype)
    lses = torch.zeros(kind.parts, 1, 2, 2)
    parts = Parts(tuple(outs.clone().unbind()), tuple(lses.clone().unbind()), False)
    merge_states.forward(None, parts, outs[0], lses[0], compile_only)
    if kind.training:
        merge_states.backward(None, parts, outs[0], lses[0], outs, lses, compile_only)
