"""Compile the Triton kernels of causal_conv1d for a GPU that is not in this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashvar.backends.triton import causal_conv1d as launches
from flashvar.backends.triton.absent_device import set_target
from flashvar.backends.triton.launch_or_compile import compile_only
from flashvar.ops.causal_conv1d.problem import Convolution, Gradients
from flashvar.ops.causal_conv1d.warmup import tensors_of

if TYPE_CHECKING:
    from flashvar.ops.causal_conv1d.warmup import Kind


def compile_for(kind: Kind, capability: tuple[int, int]) -> None:
    """Compile the kernels of a kind of call; Triton finds them where there is such a device.

    Afterwards this process cannot launch Triton kernels.
    """
    set_target(capability)
    x, weight, bias, ends = tensors_of(kind, "cpu").values()
    state = x.new_zeros(1, x.shape[-1], kind.width - 1)
    conv = Convolution(x, weight, bias, None, ends, True)
    launches.forward(None, conv, None, torch.empty_like(x), state, compile_only)
    if kind.training:
        grads = Gradients(x.clone(), weight.clone(), bias, None)
        launches.backward(None, conv, x.clone(), None, grads, compile_only)
    else:
        one = Convolution(x[:, :1], weight, bias, state, None, True)
        launches.update(None, one, None, None, None, torch.empty_like(one.x), compile_only)
