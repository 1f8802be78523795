"""Collectives with gradients, as in `flash_attn.utils.distributed`.

A tensor is split along its first dimension, one part per process of a group. Functions whose names
end in `_raw` have no gradients, and with `async_op` return a handle to wait for.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flashvar.compat.not_provided import refuse_name
from flashvar.errors import ShapeError
from flashvar.ops.arguments import check_strided

__all__ = [
    "all_gather",
    "all_gather_raw",
    "all_reduce",
    "all_reduce_raw",
    "reduce_scatter",
    "reduce_scatter_raw",
]

# A tensor, and the handle to wait for before reading it, or None.
Pending = tuple[torch.Tensor, Any]


def all_gather_raw(input_: torch.Tensor, process_group: Any, async_op: bool = False) -> Pending:
    """The parts of all processes, concatenated."""
    check_strided("input_", input_)
    rows = dist.get_world_size(process_group) * _rows(input_)
    out = input_.new_empty((rows, *input_.shape[1:]))
    part = input_.contiguous()
    return out, dist.all_gather_into_tensor(out, part, group=process_group, async_op=async_op)


def reduce_scatter_raw(input_: torch.Tensor, process_group: Any, async_op: bool = False) -> Pending:
    """This process' part of the sum over all processes."""
    check_strided("input_", input_)
    world = dist.get_world_size(process_group)
    if _rows(input_) % world:
        raise ShapeError(
            f"input_ must have a multiple of {world} rows, one part for each process, found "
            f"{tuple(input_.shape)}: pad it"
        )
    out = input_.new_empty((input_.shape[0] // world, *input_.shape[1:]))
    whole = input_.contiguous()
    return out, dist.reduce_scatter_tensor(out, whole, group=process_group, async_op=async_op)


def all_reduce_raw(input_: torch.Tensor, process_group: Any, async_op: bool = False) -> Pending:
    """The sum over all processes; in place if `input_` is contiguous."""
    check_strided("input_", input_)
    out = input_.contiguous()
    return out, dist.all_reduce(out, group=process_group, async_op=async_op)


def _rows(tensor: torch.Tensor) -> int:
    if tensor.dim() == 0:
        raise ShapeError("input_ must have rows, found a number: pass input_[None]")
    rows: int = tensor.shape[0]
    return rows


class _AllGather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, process_group: Any) -> torch.Tensor:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter(grad, ctx.process_group), None


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, process_group: Any) -> torch.Tensor:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather(grad, ctx.process_group), None


class _AllReduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, process_group: Any) -> torch.Tensor:
        return all_reduce_raw(input_.clone(), process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def all_gather(input_: torch.Tensor, process_group: Any) -> torch.Tensor:
    """The parts of all processes, concatenated; gradients are summed over the processes."""
    out: torch.Tensor = _AllGather.apply(input_, process_group)
    return out


def reduce_scatter(input_: torch.Tensor, process_group: Any) -> torch.Tensor:
    """This process' part of the sum over all processes; gradients are gathered."""
    out: torch.Tensor = _ReduceScatter.apply(input_, process_group)
    return out


def all_reduce(input_: torch.Tensor, process_group: Any) -> torch.Tensor:
    """The sum over all processes, in a new tensor; each process uses its own gradient."""
    out: torch.Tensor = _AllReduce.apply(input_, process_group)
    return out


def __getattr__(name: str) -> NoReturn:
    """Raise; for names of FlashAttention the error suggests what to use instead."""
    refuse_name(__name__, name)
