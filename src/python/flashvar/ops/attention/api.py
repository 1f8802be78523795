"""`flashvar.attention`: attention of dense tensors."""

from __future__ import annotations

from typing import Literal, overload

import torch

from flashvar.ops.attention.call import call, rng_state_of
from flashvar.ops.attention.options import is_number, truth, window_pair
from flashvar.ops.attention.problem import NO_TENSORS, pack_options, pack_tensors

Layout = Literal["bshd", "bhsd", "bhsd->bshd"]
BackendName = Literal["auto", "cuda", "triton", "reference"]


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
    alibi_slopes: torch.Tensor | None = ...,
    dropout_p: float = ...,
    rng_state: torch.Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    layout: Layout = ...,
    backend: BackendName = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


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
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    layout: Layout = "bshd",
    backend: BackendName = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(scale * q k^T + mask) v, without the matrix of scores.

    The kernels follow FlashAttention-2 (Dao 2023); sums are kept in float32. Query i and key j
    have a score s(i, j), and i has the diagonal key d(i) = i + seqlen_k - seqlen_q:

        s = scale * (q . k)
        s = softcap * tanh(s / softcap)
        s = s + bias - slope * |d(i) - j|

    There are gradients of q, k, v and bias, also through the log-sum-exp; none of second order and
    none in forward mode.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim]; bfloat16 or float16, on the CPU float32 and float64
            too. Any strides, 0 among them, with a contiguous last dimension. The head dim is at
            most 256 on CUDA devices, where one that is no multiple of 8 costs padded copies, and
            anything on the CPU.
        k: [batch, seqlen_k, heads_kv, head_dim]; heads_q is a multiple of heads_kv, and query head
            h reads key head h // (heads_q / heads_kv). Dtype and device of q.
        v: [batch, seqlen_k, heads_kv, head_dim_v]. Dtype and device of k.
        causal: Hide key j from query i where j > d(i): the last query sees all.
        scale: Factor of the scores, any finite number; head_dim ** -0.5 by default.
        window_size: (left, right): query i sees d(i) - left <= j <= d(i) + right; -1 is unbounded.
        softcap: Bound of the scores before bias; 0 is none.
        bias: [batch or 1, heads_q or 1, seqlen_q, seqlen_k] in either layout, contiguous in the
            keys; dtype of q or float32. Added to the scores.
        alibi_slopes: float32 [heads_q] or [batch, heads_q] (Press et al. 2022); no gradient.
        dropout_p: Probability, below 1 and rounded to a multiple of 2^-16, that a weight becomes 0;
            the others grow by 1 / (1 - dropout_p).
        rng_state: int64 [seed, offset] on the device of q, which decide the dropped weights
            (Philox, Salmon et al. 2011: the same ones in every backend). Drawn from torch's
            generator of that device by default.
        deterministic: The same bits of the gradients on every run; implied by
            torch.use_deterministic_algorithms.
        return_lse: Return the log-sum-exp of the scores too.
        layout: "bshd" for the shapes above, "bhsd" for [batch, heads, sequence, head_dim] in q, k,
            v and the output, "bhsd->bshd" for that in q, k and v alone; none is copied.
        backend: "auto" takes the fastest that serves. A named one serves or raises; "reference" is
            plain torch operations.

    Returns:
        The output, contiguous, [batch, seqlen_q, heads_q, head_dim_v] or as the layout says, in the
        dtype of q; with
        `return_lse` also the natural log-sum-exp [batch, heads_q, seqlen_q] in float32 (float64 for
        float64 inputs), of all weights, dropped ones too. A query that sees no key, or an empty
        sequence of keys, gives 0 and -inf.

    Raises:
        InvalidInputError: shapes, dtypes, devices, strides or options that attention does not take
            (ShapeError, DtypeError, DeviceError and LayoutError are kinds of it).
        BackendUnavailableError: nothing serves the call; the message says why for each candidate.
        BinaryError: the driver refused a launch.
    """
    drops_none = is_number(dropout_p) and dropout_p == 0.0
    if bias is None and alibi_slopes is None and rng_state is None and drops_none:
        tensors = NO_TENSORS
    else:
        rng_state = rng_state_of(q, dropout_p, rng_state)
        tensors = pack_tensors(bias, alibi_slopes, rng_state)
    left, right = window_pair(window_size)
    if return_lse is not False and return_lse is not True:
        return_lse = truth("return_lse", return_lse)
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
