"""Masks, score modifiers and dropout of a block of scores.

Blocks of scores may be transposed: `o_query` and `o_key`, positions in the sequence, are [rows, 1]
and [1, columns], or [1, columns] and [rows, 1].
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803

# Triton's own language has no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Lower bound of the maximum that exponents are relative to, as in the reference; in units of log2.
MIN_RUNNING_MAX = tl.constexpr(-(2.0**24))
# A Philox call gives half words for rows r, r + 8 and columns c, c + 1, c + 8, c + 9 of a 16 x 16
# fragment, where c is even.
PHILOX_ROUNDS = tl.constexpr(7)


@triton.jit
def visible(
    o_query,
    o_key,
    diagonal,  # key of query 0
    seqlen_k,
    window_left,
    window_right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """The mask of keys that each query sees."""
    m_visible = o_key < seqlen_k
    if RIGHT:
        m_visible = m_visible & (o_key <= o_query + (diagonal + window_right))
    if LEFT:
        m_visible = m_visible & (o_key >= o_query + (diagonal - window_left))
    return m_visible


@triton.jit
def modified(
    b_s,  # q . k
    o_query,
    o_key,
    diagonal,
    seqlen_q,
    seqlen_k,
    scale_log2,  # scale * log2(e)
    softcap_in,  # 2 * log2(e) * scale / softcap
    softcap_out,  # softcap * log2(e)
    p_bias,  # query 0, key 0 of the head; may be None
    bias_query,  # int64
    slope,  # of ALiBi, times log2(e)
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """The scores times log2(e), and the derivative of the softcap (unused without one)."""
    b_slope = b_s
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x) is correct at both infinities.
        b_tanh = 1.0 - 2.0 / (1.0 + tl.exp2(b_s * softcap_in))
        b_slope = 1.0 - b_tanh * b_tanh
        b_s = b_tanh * softcap_out
    else:
        b_s = b_s * scale_log2
    if p_bias is not None:
        b_bias = tl.load(
            p_bias + (o_query * bias_query + o_key),
            mask=(o_query < seqlen_q) & (o_key < seqlen_k),
            other=0.0,
        )
        b_s += b_bias.to(tl.float32) * LOG2E
    if ALIBI:
        b_s -= slope * tl.abs(o_query + diagonal - o_key).to(tl.float32)
    return b_s, b_slope


@triton.jit
def kept(
    o_query,
    o_key,
    p_rng,  # int64 [2]: seed and offset
    head_index,  # sequence * heads_q + head
    threshold,  # a half word in the upper half of a uint32, passed as an int32
):
    """The mask of probabilities that dropout keeps; depends on position, head, seed and offset."""
    # Broadcast to [rows, columns].
    o_row = (o_query + o_key * 0).to(tl.uint32)
    o_column = (o_key + o_query * 0).to(tl.uint32)
    o_zero = o_row * 0
    seed = tl.load(p_rng)
    offset = tl.load(p_rng + 1).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        seed,
        o_row // 16 * 8 + o_row % 8,
        o_column // 16 * 4 + o_column % 8 // 2,
        o_zero + head_index.to(tl.uint32),
        o_zero + offset,
        PHILOX_ROUNDS,
    )
    m_odd = o_column % 2 == 1
    b_word = tl.where(
        o_row // 8 % 2 == 1, tl.where(m_odd, word3, word2), tl.where(m_odd, word1, word0)
    )
    b_word = tl.where(o_column // 8 % 2 == 1, b_word, b_word << 16)
    return b_word >= threshold.to(tl.uint32, bitcast=True)
