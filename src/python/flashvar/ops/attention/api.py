"""`flashvar.attention`: attention of dense tensors."""

from __future__ import annotations

from typing import Literal, overload

import torch

from flashvar.ops.arguments import check_flag, is_number
from flashvar.ops.attention.call import call, rng_state_of
from flashvar.ops.attention.options import Layout, window_pair
from flashvar.ops.attention.problem import NO_TENSORS, pack_options, pack_tensors
from flashvar.selection.request import BackendName


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    bias: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    layout: Layout = ...,
    backend: BackendName = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    bias: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    layout: Layout = ...,
    backend: BackendName = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    bias: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: bool,
    layout: Layout = ...,
    backend: BackendName = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    layout: Layout = "bshd",
    backend: BackendName = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale * q k^T + mask) v, without storing the matrix of scores.

    The kernels follow FlashAttention-2 (Dao 2023) and sum in float32. The score s of query i and
    key j is computed in this order, where d(i) = i + seqlen_k - seqlen_q is the key on the diagonal
    of query i:

        s = scale * (q . k)
        s = softcap * tanh(s / softcap)
        s = s + bias - slope * |d(i) - j|

    and its probability is exp(s) / (sum of exp(s) over the visible keys + exp(sink)), without
    exp(sink) if there are no sinks.

    q, k, v, bias and sinks have gradients, also through the log-sum-exp. Second-order gradients and
    forward-mode differentiation are not supported.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim]; bfloat16 or float16, in the reference also float32
            and float64. The last dimension must be contiguous; the others may have any strides,
            also 0. On a GPU the head dim is at most 512 (above 256 in Triton), and inputs with a
            head dim that is not a multiple of 8 are first copied into padded tensors; the reference
            has no limit.
        k: [batch, seqlen_k, heads_kv, head_dim], with the dtype and device of q. heads_q must be a
            multiple of heads_kv; query head h reads key head h // (heads_q / heads_kv).
        v: [batch, seqlen_k, heads_kv, head_dim_v], with the dtype and device of k.
        causal: Hide key j from query i if j > d(i). The last query sees all keys.
        scale: Factor of the scores, any finite number; default head_dim ** -0.5.
        window_size: (left, right): query i sees keys d(i) - left <= j <= d(i) + right; -1 means
            unbounded.
        softcap: Bound of the scores before the bias is added; 0 means no bound.
        bias: Added to the scores: [batch or 1, heads_q or 1, seqlen_q, seqlen_k] in every layout,
            contiguous in the keys, in the dtype of q or float32. Large negative numbers mask like
            -inf: a query whose scores are all below -1.16e7 counts as one that sees no key.
        sinks: [heads_q] in float32, bfloat16 or float16: the score of one more key of each query
            head, which has no value. It is neither scaled, capped nor masked, and dropout does not
            drop it. -inf means no sink.
        alibi_slopes: float32 [heads_q] or [batch, heads_q] (Press et al. 2022); no gradient.
        dropout_p: The probability with which an element of P, the softmax of the scores, becomes 0:
            below 1, rounded to a multiple of 2^-16. The others are multiplied by
            1 / (1 - dropout_p).
        rng_state: int64 [seed, offset] on the device of q, which decide the elements that become 0
            (Philox, Salmon et al. 2011), the same ones in every backend. By default they are drawn
            from torch's generator of that device.
        deterministic: Make the gradients bit-identical between runs; implied by
            torch.use_deterministic_algorithms. The gradient of a broadcast bias then takes a
            float32 buffer of the size of the scores in the CUDA backend.
        return_lse: Also return the log-sum-exp of the scores.
        layout: "bshd" for the shapes above; "bhsd" if q, k, v and the output are [batch, heads,
            sequence, head_dim]; "bhsd->bshd" if only q, k and v are. No layout needs a copy.
        backend: "auto" takes the first of cuda, triton and reference that supports the call. A
            named backend computes the call or raises; "reference" is plain torch operations.

    Returns:
        The output, contiguous, in the dtype of q: [batch, seqlen_q, heads_q, head_dim_v], or in the
        order of the layout. With `return_lse` also the natural log-sum-exp [batch, heads_q,
        seqlen_q] in float32 (float64 for float64 inputs), which dropout does not change and which
        includes the sink. A query that sees no key has output 0; its log-sum-exp is its sink, or
        -inf without sinks. If you merge results over parts of the keys, pass `sinks` for one part
        only.

    Raises:
        InvalidInputError: a shape, dtype, device, stride or option is not supported (ShapeError,
            DtypeError, DeviceError and LayoutError are subclasses).
        BackendUnavailableError: no backend supports the call; the message has the reason for each.
        BinaryError: the driver refused a launch.
    """
    # The usual types first: calls of functions take most of the time of these lines.
    drops_none = (type(dropout_p) is float or is_number(dropout_p)) and dropout_p == 0.0
    if bias is sinks is alibi_slopes is rng_state is None and drops_none:
        tensors = NO_TENSORS
    else:
        rng_state = rng_state_of(q, dropout_p, rng_state)
        tensors = pack_tensors(bias, sinks, alibi_slopes, rng_state)
    usual = type(window_size) is tuple and len(window_size) == 2
    left, right = window_size if usual else window_pair(window_size)
    if return_lse is not False and return_lse is not True:
        check_flag("return_lse", return_lse)
    options = pack_options(
        causal,
        scale,
        left,
        right,
        softcap,
        dropout_p,
        deterministic,
        layout,
        backend,
    )
    out, lse = call(q, k, v, tensors, options, return_lse)
    return (out, lse) if lse is not None and return_lse else out
