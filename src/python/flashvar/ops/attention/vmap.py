"""Attention under `torch.vmap`: the mapped dimension becomes part of the batch.

Packed sequences have no batch dimension that could take it, and are refused. With dropout, and
where sinks are mapped or have gradients, the entries are computed one by one: masks of dropout
depend on the place in the batch, and sinks are those of a whole batch.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from flashvar.errors import BackendUnavailableError
from flashvar.ops.attention.problem import Inputs
from flashvar.ops.attention.validate import rows_contiguous

_TENSORS: Final = len(Inputs._fields)
# Arguments of a backward before its inputs: grad_out, grad_lse, out, lse, wants_bias, wants_sinks.
_BEFORE: Final = 6


def forward_batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """The batching rule of attention_fwd."""
    size: int = info.batch_size
    op = torch.ops.flashvar.attention_fwd.default
    _refuse_packed(arguments)
    # Without entries there are no results to stack.
    if _differs_by_entry(in_dims, arguments) and size:
        return _one_by_one(op, size, in_dims, arguments)
    inputs, batch = _fold_inputs(size, in_dims, arguments, whole_bias=False)
    out, lse = op(*inputs, *arguments[_TENSORS:])
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def backward_batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """The batching rule of attention_bwd."""
    size: int = info.batch_size
    op = torch.ops.flashvar.attention_bwd.default
    rest, dims = arguments[_BEFORE:], in_dims[_BEFORE:]
    wants_bias, wants_sinks = arguments[4:_BEFORE]
    _refuse_packed(rest)
    if (_differs_by_entry(dims, rest) or wants_sinks) and size:
        return _one_by_one(op, size, in_dims, arguments)
    outer = [_fold(x, dim, size) for x, dim in zip(arguments[:4], in_dims[:4], strict=True)]
    inputs, batch = _fold_inputs(size, dims, rest, whole_bias=True)
    *grads, grad_bias, grad_sinks = op(*outer, wants_bias, wants_sinks, *inputs, *rest[_TENSORS:])
    found = [grad.unflatten(0, (size, batch)) for grad in grads]
    bias = rest[Inputs._fields.index("bias")]
    if not wants_bias or bias is None:
        return (*found, grad_bias, grad_sinks), (0, 0, 0, None, None)
    grad_bias = grad_bias.unflatten(0, (size, batch))
    if _own_batch(bias, dims[Inputs._fields.index("bias")]) == 1:
        grad_bias = grad_bias.sum(1, keepdim=True)
    return (*found, grad_bias, grad_sinks), (0, 0, 0, 0, None)


def _refuse_packed(arguments: tuple[Any, ...]) -> None:
    """Refuse packed sequences; `arguments` begin with the inputs of a call."""
    inputs = Inputs._make(arguments[:_TENSORS])
    if inputs.cu_seqlens_q is not None or inputs.cu_seqlens_k is not None:
        raise BackendUnavailableError(
            "attention of packed sequences cannot be mapped, found cu_seqlens under torch.vmap: "
            "pack all sequences together, or loop over the calls"
        )


def _differs_by_entry(in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
    """Whether results depend on the place in the batch, or entries have sinks of their own."""
    inputs, dims = Inputs._make(arguments[:_TENSORS]), Inputs._make(in_dims[:_TENSORS])
    return inputs.rng_state is not None or dims.sinks is not None


def _one_by_one(
    op: Any, size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The results of each entry, stacked."""
    entries = [
        # Rows are contiguous, also where the mapped dimension is the last one in memory.
        [x] * size if dim is None else x.movedim(dim, 0).contiguous().unbind()
        for x, dim in zip(arguments, in_dims, strict=True)
    ]
    results = [op(*one) for one in zip(*entries, strict=True)]
    stacked = tuple(torch.stack(of_all) for of_all in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _fold_inputs(
    size: int, in_dims: tuple[Any, ...], arguments: tuple[Any, ...], *, whole_bias: bool
) -> tuple[list[Any], int]:
    """The tensors with the mapped dimension folded into the batch, and their own batch size."""
    inputs = Inputs._make(arguments[:_TENSORS])
    dims = Inputs._make(in_dims[:_TENSORS])
    batch = _own_batch(inputs.q, dims.q)
    bias, slopes = inputs.bias, inputs.alibi_slopes
    if bias is not None and (dims.bias is not None or whole_bias or bias.shape[0] > 1):
        bias = _fold(bias, dims.bias, size, batch)
    if slopes is not None and (dims.alibi_slopes is not None or slopes.dim() == 2):
        front = _front(slopes, dims.alibi_slopes, size)
        front = front[:, None] if front.dim() == 2 else front
        slopes = front.expand(size, batch, front.shape[-1]).flatten(0, 1)
    folded = inputs._replace(
        q=_fold(inputs.q, dims.q, size),
        k=_fold(inputs.k, dims.k, size),
        v=_fold(inputs.v, dims.v, size),
        bias=bias,
        alibi_slopes=slopes,
        seqused_k=_fold(inputs.seqused_k, dims.seqused_k, size),
    )
    # Rows are contiguous, also where the mapped dimension is the last one in memory.
    return [rows_contiguous(x) for x in folded], batch


def _own_batch(tensor: torch.Tensor, dim: int | None) -> int:
    """The size of the batch, which is the first dimension that is not mapped."""
    size: int = tensor.shape[1 if dim == 0 else 0]
    return size


def _front(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    if dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(dim, 0)


def _fold(tensor: Any, dim: int | None, size: int, batch: int | None = None) -> Any:
    """[size, batch, ...] as [size * batch, ...]; a batch of 1 is expanded to `batch`."""
    if tensor is None:
        return None
    front = _front(tensor, dim, size)
    if batch is not None:
        front = front.expand(size, batch, *front.shape[2:])
    return front.flatten(0, 1)
