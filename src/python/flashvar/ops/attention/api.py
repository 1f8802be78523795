"""`flashvar.attention`: attention of dense tensors."""

from __future__ import annotations

from typing import Literal, overload

import torch

from flashvar.ops.arguments import as_bool
from flashvar.ops.attention.call import call, rng_state_of
from flashvar.ops.attention.options import is_number, window_pair
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

    q, k, v and bias have gradients, also through the log-sum-exp. Second-order gradients and
    forward-mode differentiation are not supported.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim]; bfloat16 or float16, on the CPU also float32 and
            float64. The last dimension is contiguous; the others may have any strides, also 0. On
            CUDA devices the head dim is at most 256, and a head dim that is not a multiple of 8
            costs padded copies; on the CPU there is no limit.
        k: [batch, seqlen_k, heads_kv, head_dim]; heads_q is a multiple of heads_kv, and query head
            h reads key head h // (heads_q / heads_kv). Dtype and device of q.
        v: [batch, seqlen_k, heads_kv, head_dim_v]. Dtype and device of k.
        causal: Hide key j from query i where j > d(i): the last query sees all keys.
        scale: Factor of the scores, any finite number; head_dim ** -0.5 by default.
        window_size: (left, right): query i sees d(i) - left <= j <= d(i) + right; -1 is unbounded.
        softcap: Bound of the scores before the bias is added; 0 for no bound.
        bias: [batch or 1, heads_q or 1, seqlen_q, seqlen_k] in either layout, contiguous in the
            keys; dtype of q or float32. Added to the scores.
        alibi_slopes: float32 [heads_q] or [batch, heads_q] (Press et al. 2022); no gradient.
        dropout_p: The share of entries of P, the softmax of the scores, that become 0: below 1 and
            rounded to a multiple of 2^-16. The others are multiplied by 1 / (1 - dropout_p).
        rng_state: int64 [seed, offset] on the device of q. They decide which entries become 0
            (Philox, Salmon et al. 2011), the same in every backend. Drawn from torch's generator
            of that device by default.
        deterministic: Make the gradients bit-identical between runs; implied by
            torch.use_deterministic_algorithms.
        return_lse: Return the log-sum-exp of the scores too.
        layout: "bshd" for the shapes above; "bhsd" if q, k, v and the output are [batch, heads,
            sequence, head_dim]; "bhsd->bshd" if only q, k and v are. No layout needs a copy.
        backend: "auto" takes the fastest backend that can serve the call. A named backend serves
            the call or raises; "reference" is plain torch operations.

    Returns:
        The output, contiguous, in the dtype of q: [batch, seqlen_q, heads_q, head_dim_v], or in the
        order that the layout says. With `return_lse` also the natural log-sum-exp [batch, heads_q,
        seqlen_q] in float32 (float64 for float64 inputs), of dropped
        scores too. A query that sees no key has output 0 and log-sum-exp -inf.

    Raises:
        InvalidInputError: a shape, dtype, device, stride or option is not supported (ShapeError,
            DtypeError, DeviceError and LayoutError are subclasses).
        BackendUnavailableError: no backend can serve the call; the message has the reason of each.
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
        return_lse = as_bool("return_lse", return_lse)
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
