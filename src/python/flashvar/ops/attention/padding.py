"""Padding of head dims that are not a multiple of 8, for kernels that read rows 16 bytes at a time.

Zeros appended to the rows of q, k and v change no score. They give columns of zeros in the output
and the gradients, which are cut off again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashvar.ops.attention.problem import Gradients, Inputs, Problem
from flashvar.ops.attention.spec import HEAD_DIM_STEP

if TYPE_CHECKING:
    from flashvar.ops.attention.problem import Launch


def needs_padding(problem: Problem, backend: str) -> bool:
    """Whether a kernel runs the problem and a head dim is not a multiple of 8."""
    in_kernels = problem.device is not None and backend != "reference"
    return in_kernels and (
        problem.head_dim % HEAD_DIM_STEP != 0 or problem.head_dim_v % HEAD_DIM_STEP != 0
    )


def pad(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, its last dimension padded with zeros to a multiple of 8."""
    missing = -tensor.shape[-1] % HEAD_DIM_STEP
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def pad_inputs(inputs: Inputs) -> Inputs:
    """The inputs with padded q, k and v."""
    return inputs._replace(q=pad(inputs.q), k=pad(inputs.k), v=pad(inputs.v))


def unpad_gradients(grads: Gradients, inputs: Inputs) -> Gradients:
    """The gradients of padded inputs, cut to the shapes of the inputs."""
    q, k, v = (
        torch.empty_like(tensor).copy_(grad[..., : tensor.shape[-1]])
        for tensor, grad in zip(inputs[:3], grads[:3], strict=True)
    )
    return grads._replace(q=q, k=k, v=v)


def padded_launch(problem: Problem, launch: Launch) -> Launch:
    """The launch of an unpadded problem, made from the launch of the padded problem."""
    head_dim_v = problem.head_dim_v

    def run(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        padded_out = pad(out)
        launch(pad_inputs(inputs), padded_out, lse)
        if padded_out is not out:
            out.copy_(padded_out[..., :head_dim_v])

    return run
