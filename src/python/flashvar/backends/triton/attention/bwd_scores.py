"""The gradients of a tile of scores, used by every kernel of the Triton backward."""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803, N806

# Triton's own language has no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from flashvar.backends.triton.attention.scores import kept, modified, visible


@triton.jit
def grad_scores(
    b_s,  # q . k, [queries, keys] or transposed
    b_dp,  # grad_out . v
    b_lse,  # log-sum-exp times log2(e) of each query, inf if it sees no key; broadcast
    b_delta,  # delta of each query; broadcast
    o_query,
    o_key,
    p_bias,
    p_rng,
    bias_query,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    scale_log2,
    softcap_in,
    softcap_out,
    slope,
    head_index,
    dropout_threshold,
    dropout_scale,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """P after dropout, the gradient of the bias, and the gradient of scale * q . k.

    Dropped probabilities are 0; kept ones are not yet multiplied by `dropout_scale`.
    """
    MODIFIED: tl.constexpr = SOFTCAP or ALIBI or (p_bias is not None)
    diagonal = seqlen_k - seqlen_q
    b_slope = b_s
    if MODIFIED:
        b_s, b_slope = modified(
            b_s, o_query, o_key, diagonal, seqlen_q, seqlen_k, scale_log2, softcap_in,
            softcap_out, p_bias, bias_query, slope, SOFTCAP, ALIBI,
        )  # fmt: skip
        b_p = tl.exp2(b_s - b_lse)
    else:
        b_p = tl.exp2(b_s * scale_log2 - b_lse)
    if MASKED:
        m_visible = visible(
            o_query, o_key, diagonal, seqlen_k, window_left, window_right, LEFT, RIGHT
        )
        b_p = tl.where(m_visible, b_p, 0.0)
    b_dropped = b_p
    if p_rng is not None:
        m_kept = kept(o_query, o_key, p_rng, head_index, dropout_threshold)
        b_dropped = tl.where(m_kept, b_p, 0.0)
        b_dp = tl.where(m_kept, b_dp * dropout_scale, 0.0)
    b_dbias = b_p * (b_dp - b_delta)
    b_ds = b_dbias
    if SOFTCAP:
        b_ds = b_ds * b_slope
    return b_dropped, b_dbias, b_ds
