"""Compile the Triton kernels of merge_states for a GPU that is not in this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashvar.backends.triton import merge_states
from flashvar.backends.triton.absent_device import set_target
from flashvar.backends.triton.launch_or_compile import compile_only
from flashvar.ops.merge_states.inputs import views_of
from flashvar.ops.merge_states.problem import Wanted
from flashvar.ops.merge_states.run import like_backward, like_forward

if TYPE_CHECKING:
    from flashvar.ops.merge_states.warmup import Kind


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile the kernels of a kind of call; Triton finds them where there is such a device.

    Afterwards this process cannot launch Triton kernels.
    """
    set_target(capability)
    outs, lses = kind.tensors(torch.device("cpu"))
    parts = views_of(outs, lses, kind.stacked, "bshd")
    options = kind.stacked, "bshd"
    forward = (parts, *like_forward(outs, lses, *options))
    merge_states.prepare_forward(None, *forward, compile_only)(*forward)
    _, out, lse = forward
    for has_grad_lse, wanted in kind.backwards() if kind.training else ():
        written = Wanted.of(wanted, len(outs), kind.stacked)
        grad_outs, grad_lses = like_backward(outs, lses, kind.stacked, wanted)
        backward = (
            parts,
            out,
            lse if has_grad_lse else None,
            grad_outs if written.outs else None,
            grad_lses if written.lses else None,
        )
        merge_states.prepare_backward(None, *backward, written.skipped, compile_only)(*backward)
