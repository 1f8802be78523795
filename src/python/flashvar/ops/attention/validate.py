"""Checks of q, k and v, and of whole calls.

`inspect` checks a call and returns its `Problem`.
"""

from __future__ import annotations

from typing import Final, ParamSpec, TypeVar

import torch

from flashvar.errors import DeviceError, DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.arguments import check_strided
from flashvar.ops.attention import optional_tensors
from flashvar.ops.attention.options import bound_of, check_options, scale_of, window_of
from flashvar.ops.attention.problem import BackwardProblem, Inputs, Options, Problem, Strides
from flashvar.ops.attention.spec import HEAD_DIM_MAX
from flashvar.ops.dtypes import DTYPES
from flashvar.ops.unknown_sizes import differ, is_known

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

KERNEL_DTYPES: Final = ("bf16", "fp16")


def inspect(inputs: Inputs, options: Options) -> Problem:
    """Check the arguments of a call of attention and describe it.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, InvalidInputError: with what was expected,
            what was found and what to do.
    """
    check_options(options)
    check_tensors(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    layout, layout_out = layouts_of(options.layout)
    device = common_device(q, k, v)
    in_kernels = device.type == "cuda" and options.backend != "reference"
    dtype = common_dtype(q, k, v, in_kernels)
    check_pair(k, v)
    total_q, total_k = None, None
    if inputs.cu_seqlens_q is None:
        batch, seqlen_q, heads_q, head_dim = dense_sizes("q", q, layout)
        if inputs.cu_seqlens_k is not None:
            raise InvalidInputError(
                "cu_seqlens_k needs cu_seqlens_q, found a dense q with packed k and v: "
                "pack q too, cu_seqlens_q = arange(batch + 1) * seqlen_q"
            )
    else:
        batch = optional_tensors.sequences(inputs.cu_seqlens_q)
        optional_tensors.check_numbers("cu_seqlens_q", inputs.cu_seqlens_q, batch + 1, device)
        total_q, heads_q, head_dim = packed_sizes("q", q)
        seqlen_q = bound_of(options.max_seqlen_q, total_q)
    if inputs.cu_seqlens_k is None:
        batch_k, seqlen_k, heads_kv, head_dim_k = dense_sizes("k", k, layout)
    else:
        batch_k = batch
        optional_tensors.check_numbers("cu_seqlens_k", inputs.cu_seqlens_k, batch + 1, device)
        total_k, heads_kv, head_dim_k = packed_sizes("k", k)
        seqlen_k = bound_of(options.max_seqlen_k, total_k)
    if inputs.seqused_k is not None:
        optional_tensors.check_numbers("seqused_k", inputs.seqused_k, batch, device)
    head_dim_v = v.shape[-1]
    check_fit(batch, batch_k, head_dim, head_dim_k, options.layout)
    check_heads(heads_q, heads_kv, options.layout)
    check_head_dim("head dim", head_dim, in_kernels)
    check_head_dim("head dim of v", head_dim_v, in_kernels)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_last_stride(name, tensor)
    bias = None
    if inputs.bias is not None:
        if total_q is not None:
            raise InvalidInputError(
                "bias cannot be combined with packed sequences, found both: pad the sequences, or "
                "use alibi_slopes"
            )
        bias = optional_tensors.check_bias(inputs.bias, q, (batch, heads_q, seqlen_q, seqlen_k))
    sinks = None
    if inputs.sinks is not None:
        sinks = optional_tensors.check_sinks(inputs.sinks, q, heads_q)
    alibi = None
    if inputs.alibi_slopes is not None:
        alibi = optional_tensors.check_slopes(inputs.alibi_slopes, batch, heads_q, device)
    optional_tensors.check_rng(inputs.rng_state, options.dropout_p, device)
    window_left, window_right = window_of(options, seqlen_q, seqlen_k)
    rows = q.shape[:-1] if layout == layout_out else (batch, seqlen_q, heads_q)
    out_shape = (*rows, head_dim_v)
    return Problem(
        dtype=dtype,
        device=None if device.type != "cuda" else (device.index or 0),
        layout=layout,
        layout_out=layout_out,
        scale=scale_of(options.scale, head_dim),
        window_left=window_left,
        window_right=window_right,
        softcap=float(options.softcap),
        dropout_p=float(options.dropout_p),
        deterministic=options.deterministic,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        total_q=total_q,
        total_k=total_k,
        has_seqused_k=inputs.seqused_k is not None,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        q=strides_of(q, layout),
        k=strides_of(k, layout),
        v=strides_of(v, layout),
        out=contiguous_strides(out_shape, layout_out),
        out_shape=out_shape,
        bias=bias,
        bias_dtype=None if inputs.bias is None else DTYPES[inputs.bias.dtype],
        alibi_batch_stride=alibi,
        sinks_dtype=sinks,
    )


def layouts_of(layout: str) -> tuple[str, str]:
    """The order of the dimensions of q, k and v, and that of the output."""
    given, _, returned = layout.partition("->")
    return given, returned or given


def check_tensors(inputs: Inputs) -> None:
    """Refuse inputs that are not strided tensors.

    Raises:
        InvalidInputError, LayoutError: with what was expected, what was found and what to do.
    """
    for name, tensor in zip(Inputs._fields, inputs, strict=True):
        if tensor is not None or name in "qkv":
            check_strided(name, tensor)


def inspect_symbolic(inputs: Inputs, options: Options) -> Problem:
    """The problem of tensors whose sizes may be symbols, while a graph is traced.

    Numbers that may be symbols (scale, window, softcap, bounds of lengths) are left out; they are
    checked when the op runs.
    """
    dropout_p = 0.5 if inputs.rng_state is not None else 0.0
    return inspect(
        inputs,
        Options(
            causal=options.causal,
            scale=1.0,  # the default as a float would tie the graph to one head dim
            dropout_p=dropout_p,
            deterministic=options.deterministic,
            layout=options.layout,
            backend=options.backend,
        ),
    )


def inspect_backward(
    inputs: Inputs,
    options: Options,
    grad_out: torch.Tensor,
    wants_bias: bool,
) -> BackwardProblem:
    """The backward of a call; gradients have the strides of torch.empty_like of their tensors."""
    problem = inspect(inputs, options)
    grad_q, grad_k, grad_v = (
        strides_of(torch.empty_like(x, device="meta"), problem.layout) for x in inputs[:3]
    )
    bias = None
    if wants_bias and inputs.bias is not None:
        bias = optional_tensors.bias_strides(
            inputs.bias.new_empty(inputs.bias.shape, device="meta")
        )
    return BackwardProblem(
        forward=problem,
        grad_out=strides_of(grad_out, problem.layout_out),
        grad_q=grad_q,
        grad_k=grad_k,
        grad_v=grad_v,
        grad_bias=bias,
    )


def rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its last dimension is strided; other values are returned unchanged."""
    try:
        if tensor.stride(-1) == 1 or tensor.layout is not torch.strided:
            return tensor
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return tensor
    return tensor.contiguous()


def common_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.device:
    """The device of all three."""
    if q.device != k.device or q.device != v.device:
        raise DeviceError(
            f"q, k and v must be on one device, found q on {q.device}, k on {k.device} and v on "
            f"{v.device}: move them with .to(q.device)"
        )
    if q.device.type not in ("cpu", "cuda", "meta"):
        raise DeviceError(
            f"q, k and v must be on a CUDA device or the CPU, found {q.device}: "
            "move them with .to('cuda') or .to('cpu')"
        )
    return q.device


def common_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, in_kernels: bool) -> str:
    """The name of the dtype of all three, as in requests."""
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise DtypeError(
            f"q, k and v must have one dtype, found {q.dtype}, {k.dtype} and {v.dtype}: "
            "cast them with .to(q.dtype)"
        )
    dtype = DTYPES.get(q.dtype)
    if dtype is None:
        raise DtypeError(
            f"q, k and v must be bfloat16 or float16 (float32 and float64 too on the CPU), found "
            f"{q.dtype}: cast them with .to(torch.bfloat16)"
        )
    if in_kernels and dtype not in KERNEL_DTYPES:
        raise DtypeError(
            f"q, k and v must be bfloat16 or float16 on a CUDA device, found {q.dtype}: cast them "
            "with .to(torch.bfloat16), or name backend='reference', which is slow"
        )
    return dtype


def dense_sizes(name: str, tensor: torch.Tensor, layout: str) -> tuple[int, int, int, int]:
    """Batch, sequence, heads and head dim."""
    if tensor.dim() != 4:
        raise ShapeError(
            f"{name} must have 4 dimensions ({', '.join(layout)}), found {tensor.dim()}: "
            f"{_shape(tensor)}: add the missing one with unsqueeze()"
        )
    batch, second, third, head_dim = tensor.shape
    if layout == "bhsd":
        return batch, third, second, head_dim
    return batch, second, third, head_dim


def packed_sizes(name: str, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Total, heads and head dim."""
    if tensor.dim() != 3:
        raise ShapeError(
            f"packed {name} must have 3 dimensions (total, heads, head_dim), found {tensor.dim()}: "
            f"{_shape(tensor)}: flatten(0, 1) joins batch and sequence"
        )
    total, heads, head_dim = tensor.shape
    return total, heads, head_dim


def check_pair(k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that k and v have the same shape except for the head dim."""
    if differ(v.shape[:-1], k.shape[:-1]):
        raise ShapeError(
            "k and v must have the same shape except for the head dim, found k "
            f"{_shape(k)} and v {_shape(v)}: pass one value vector for each key"
        )


def check_fit(batch: int, batch_k: int, head_dim: int, head_dim_k: int, layout: str) -> None:
    """Check that q and k have the same batch size and head dim."""
    if is_known(batch_k != batch):
        raise ShapeError(
            f"q, k and v must have the same batch size, found {batch} in q and {batch_k} in k: "
            "expand() the smaller one (an expanded dimension is not copied)"
        )
    if is_known(head_dim_k != head_dim):
        raise ShapeError(
            f"q and k must have the same head dim, found {head_dim} in q and {head_dim_k} in k: "
            f"check that layout={layout!r} is the order of your dimensions"
        )


def check_heads(heads_q: int, heads_kv: int, layout: str) -> None:
    """Check that every key head is shared by the same number of query heads."""
    if is_known(heads_kv < 1) or is_known(heads_q < 1) or is_known(heads_q % heads_kv != 0):
        raise ShapeError(
            "the heads of q must be a positive multiple of the heads of k and v, found "
            f"{heads_q} and {heads_kv}: repeat heads of q, or check that layout={layout!r} is the "
            "order of your dimensions"
        )


def check_head_dim(name: str, head_dim: int, in_kernels: bool) -> None:
    """Check a head dim: at least 1, and in kernels at most HEAD_DIM_MAX."""
    if is_known(head_dim < 1):
        raise ShapeError(
            f"the {name} must be at least 1, found {head_dim}: pass vectors with at least one "
            "element"
        )
    if in_kernels and is_known(head_dim > HEAD_DIM_MAX):
        raise ShapeError(
            f"the {name} must be from 1 to {HEAD_DIM_MAX} on a CUDA device, found {head_dim}: "
            "use torch.nn.functional.scaled_dot_product_attention, or name backend='reference'"
        )


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Check that rows are contiguous: kernels load neighboring elements together."""
    if all(is_known(x) for x in (tensor.stride(-1) != 1, tensor.shape[-1] > 1, tensor.numel() > 0)):
        raise LayoutError(
            f"{name} must be contiguous in its last dimension (stride 1), found strides "
            f"{tuple(tensor.stride())}: call {name}.contiguous() or transpose other dimensions"
        )


def strides_of(tensor: torch.Tensor, layout: str) -> Strides:
    """The strides of a dense tensor, or of a packed tensor, whose batch stride is 0.

    A dimension of size 1 gets stride 0: its stride is arbitrary and must not make rows look
    unaligned.
    """
    pairs = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    strides = [0 if is_known(size <= 1) else stride for stride, size in pairs]
    if len(strides) == 2:
        return Strides(0, *strides)
    batch, second, third = strides
    return Strides(batch, third, second) if layout == "bhsd" else Strides(batch, second, third)


def contiguous_strides(shape: tuple[int, ...], layout: str) -> Strides:
    """The strides of a contiguous tensor of this shape."""
    if len(shape) == 3:
        return Strides(0, shape[1] * shape[2], shape[2])
    first, second, third = shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]
    return Strides(first, third, second) if layout == "bhsd" else Strides(first, second, third)


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))
