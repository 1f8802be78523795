"""Is this a call of attention that can be served, and what exactly is asked?

`inspect` reads facts off the tensors, refuses what no kernel takes, and returns a `Problem`.
"""

from __future__ import annotations

import torch

from flashvar.errors import InvalidInputError
from flashvar.ops.attention import optional_tensors as extras
from flashvar.ops.attention import tensors as tensors
from flashvar.ops.attention.options import bound_of, check_options, scale_of, window_of
from flashvar.ops.attention.problem import BackwardProblem, Inputs, Options, Problem


def inspect(inputs: Inputs, options: Options) -> Problem:
    """Check the arguments of a call of attention and describe it.

    Raises:
        ShapeError, DtypeError, DeviceError, LayoutError, InvalidInputError: with what was expected,
            what was found and what to do.
    """
    check_options(options)
    check_tensors(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    layout, layout_out = orders(options.layout)
    device = tensors.common_device(q, k, v)
    in_kernels = device.type == "cuda" and options.backend != "reference"
    dtype = tensors.common_dtype(q, k, v, in_kernels)
    tensors.check_pair(k, v)
    total_q, total_k = None, None
    if inputs.cu_seqlens_q is None:
        batch, seqlen_q, heads_q, head_dim = tensors.dense_sizes("q", q, layout)
        if inputs.cu_seqlens_k is not None:
            raise InvalidInputError(
                "cu_seqlens_k needs cu_seqlens_q, got a dense q beside packed k and v: "
                "pack q too, cu_seqlens_q = arange(batch + 1) * seqlen_q"
            )
    else:
        batch = extras.sequences(inputs.cu_seqlens_q)
        extras.check_integers("cu_seqlens_q", inputs.cu_seqlens_q, batch + 1, device)
        total_q, heads_q, head_dim = tensors.packed_sizes("q", q)
        seqlen_q = bound_of(options.max_seqlen_q, total_q)
    if inputs.cu_seqlens_k is None:
        batch_k, seqlen_k, heads_kv, head_dim_k = tensors.dense_sizes("k", k, layout)
    else:
        batch_k = batch
        extras.check_integers("cu_seqlens_k", inputs.cu_seqlens_k, batch + 1, device)
        total_k, heads_kv, head_dim_k = tensors.packed_sizes("k", k)
        seqlen_k = bound_of(options.max_seqlen_k, total_k)
    if inputs.seqused_k is not None:
        extras.check_integers("seqused_k", inputs.seqused_k, batch, device)
    head_dim_v = v.shape[-1]
    tensors.check_fit(batch, batch_k, head_dim, head_dim_k, options.layout)
    tensors.check_heads(heads_q, heads_kv, options.layout)
    tensors.check_head_dim("head dim", head_dim, in_kernels)
    tensors.check_head_dim("head dim of v", head_dim_v, in_kernels)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        tensors.check_last_stride(name, tensor)
    bias = None
    if inputs.bias is not None:
        if total_q is not None:
            raise InvalidInputError(
                "bias does not go with packed sequences, got both: pad the sequences, or use "
                "alibi_slopes"
            )
        bias = extras.check_bias(inputs.bias, q, (batch, heads_q, seqlen_q, seqlen_k))
    alibi = None
    if inputs.alibi_slopes is not None:
        alibi = extras.check_slopes(inputs.alibi_slopes, batch, heads_q, device)
    extras.check_rng(inputs.rng_state, options.dropout_p, device)
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
        q=tensors.strides_of(q, layout),
        k=tensors.strides_of(k, layout),
        v=tensors.strides_of(v, layout),
        out=tensors.contiguous_strides(out_shape, layout_out),
        out_shape=out_shape,
        bias=bias,
        bias_dtype=None if inputs.bias is None else tensors.DTYPES[inputs.bias.dtype],
        alibi_batch_stride=alibi,
    )


def orders(layout: str) -> tuple[str, str]:
    """The order of the dimensions of q, k and v, and that of the output's."""
    given, _, returned = layout.partition("->")
    return given, returned or given


def check_tensors(inputs: Inputs) -> None:
    """Refuse what is no strided tensor.

    Raises:
        InvalidInputError, LayoutError: with what was expected, what was found and what to do.
    """
    for name, tensor in zip(Inputs._fields, inputs, strict=True):
        if tensor is not None or name in "qkv":
            tensors.check_strided(name, tensor)


def inspect_symbolic(inputs: Inputs, options: Options) -> Problem:
    """The problem of tensors whose sizes may be symbols, while a graph is traced.

    What only the value of a number decides is left out; it is checked when the op runs.
    """
    dropout_p = 0.5 if inputs.rng_state is not None else 0.0
    return inspect(
        inputs,
        Options(
            causal=options.causal,
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
    """The backward of a call; gradients lie in memory as torch.empty_like of their tensors."""
    problem = inspect(inputs, options)
    grad_q, grad_k, grad_v = (
        tensors.strides_of(torch.empty_like(x, device="meta"), problem.layout) for x in inputs[:3]
    )
    bias = None
    if wants_bias and inputs.bias is not None:
        bias = extras.bias_strides(inputs.bias.new_empty(inputs.bias.shape, device="meta"))
    return BackwardProblem(
        forward=problem,
        grad_out=tensors.strides_of(grad_out, problem.layout_out),
        grad_q=grad_q,
        grad_k=grad_k,
        grad_v=grad_v,
        grad_bias=bias,
    )
