"""Bounds of the loops: keys that a block of queries sees, queries that see a block of keys."""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803

# Triton's own language has no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keys_of_block(
    i_query,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """start, stop, unmasked, masked and gap of a block of queries.

    Some row of the block sees the keys from `start` to `stop`; every row sees the `gap` keys from
    `unmasked` to `masked`. Without LEFT these come first, and `start` is where they end.
    """
    start = 0
    unmasked = 0
    masked = seqlen_k
    stop = seqlen_k
    diagonal = i_query + seqlen_k - seqlen_q
    if RIGHT:
        stop = tl.minimum(stop, tl.maximum(diagonal + BLOCK_Q + window_right, 0))
        masked = tl.minimum(masked, tl.maximum(diagonal + 1 + window_right, 0))
    if LEFT:
        start = tl.maximum(diagonal - window_left, 0) // BLOCK_KV * BLOCK_KV
        unmasked = tl.maximum(diagonal + BLOCK_Q - 1 - window_left, 0)
        unmasked = tl.minimum(tl.cdiv(unmasked, BLOCK_KV) * BLOCK_KV, tl.maximum(start, stop))
    masked = tl.maximum(masked // BLOCK_KV * BLOCK_KV, unmasked)
    gap = masked - unmasked
    if not LEFT:
        start = masked
        gap = 0
    return start, stop, unmasked, masked, gap


@triton.jit
def queries_of_block(
    i_key,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """start, stop, unmasked, masked and gap of a block of keys.

    Queries from `start` to `stop` see some key of the block; the `gap` queries from `unmasked` to
    `masked` see all of them.
    """
    start = 0
    unmasked = 0
    masked = seqlen_q
    stop = seqlen_q
    diagonal = i_key - (seqlen_k - seqlen_q)
    if RIGHT:
        start = tl.minimum(tl.maximum(diagonal - window_right, 0), seqlen_q) // BLOCK_Q * BLOCK_Q
        unmasked = tl.maximum(diagonal + BLOCK_KV - 1 - window_right, 0)
        unmasked = tl.cdiv(unmasked, BLOCK_Q) * BLOCK_Q
    if LEFT:
        stop = tl.minimum(stop, tl.maximum(diagonal + BLOCK_KV + window_left, 0))
        masked = tl.minimum(masked, tl.maximum(diagonal + 1 + window_left, 0))
    # No query sees keys beyond seqlen_k.
    stop = tl.where(i_key < seqlen_k, stop, start)
    masked = tl.where(i_key + BLOCK_KV <= seqlen_k, masked, start)
    unmasked = tl.minimum(unmasked, tl.maximum(start, stop))
    masked = tl.maximum(masked // BLOCK_Q * BLOCK_Q, unmasked)
    return start, stop, unmasked, masked, masked - unmasked
