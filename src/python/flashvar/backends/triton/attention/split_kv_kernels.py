"""The Triton kernels of attention of few queries, on keys in tensors or in a KV cache.

The rows of a program are the queries of all heads that share a key head, so that keys are read
once: row r is query r // GROUP of member r % GROUP. The keys of a sequence may be shared by several
programs, splits; their results are merged by a second kernel (split-KV, Flash-Decoding, Dao et al.
2023).
"""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from flashvar.backends.triton.attention.scores import LOG2E, MIN_RUNNING_MAX, modified, visible
from flashvar.backends.triton.attention.sequences import span

# They change from call to call: one kernel runs all of their values.
_RUNTIME: Final = (
    *("seqlen_q", "total_q", "heads_kv", "heads_first", "slots", "size", "pages", "new", "splits"),
    *("window_left", "window_right", "scale_log2", "softcap_in", "softcap_out", "slopes_batch"),
    *("q_batch", "q_row", "q_head", "k_slot", "k_row", "k_head", "v_slot", "v_row", "v_head"),
    *("table_row", "table_page", "bias_batch", "bias_head", "bias_query"),
)


@triton.jit
def _load_rows(p_rows, m_rows, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The rows at addresses [rows], padded to [rows, BLOCK]; 0 where there is nothing."""
    o_dim = tl.arange(0, BLOCK)
    m_x = m_rows[:, None]
    if BLOCK > DIM:
        m_x = m_x & (o_dim < DIM)[None, :]
    return tl.load(p_rows[:, None] + o_dim[None, :], mask=m_x, other=0.0)


@triton.jit(do_not_specialize=_RUNTIME)
def split_kv_kernel(
    p_out,  # [batch, seqlen_q, heads, V_DIM] contiguous, or heads_first, written; MERGED: float32
    # [batch, heads_kv, splits, rows, V_DIM]
    p_lse,  # [batch, heads, seqlen_q] float32, written, or None; MERGED: [batch, heads_kv, splits,
    # rows], in base 2
    p_q,  # [batch, seqlen_q, heads, K_DIM], or [total_q, heads, K_DIM]; heads: heads_kv * GROUP
    p_k,  # [slots, size, heads_kv, K_DIM]
    p_v,  # [slots, size, heads_kv, V_DIM]
    p_slots,  # [batch]; None: the number of the sequence
    p_table,  # [batch, pages]; None: a slot is one page
    p_before,  # [batch], how many keys were in the cache before `new` ones; None: there is no cache
    p_begins,  # [batch], the position of the first key; None: 0
    p_lengths,  # int32 [batch], the keys of each sequence; None: all
    p_slopes,  # float32 [batch, heads]; None: no ALiBi
    p_bias,  # [batch, heads, seqlen_q, size]; None: no bias
    p_sinks,  # [heads]; None: no sinks, or MERGED
    p_offsets_q,  # int32 [batch + 1]; None: q is dense
    table_row,
    table_page,
    q_batch,  # strides of q and the caches are in units of UNIT elements
    q_row,
    q_head,
    k_slot,
    k_row,
    k_head,
    v_slot,
    v_row,
    v_head,
    slopes_batch,
    bias_batch,
    bias_head,
    bias_query,
    seqlen_q,  # with offsets the longest
    total_q,  # with offsets the rows of q
    heads_kv,
    heads_first,  # whether the output is [batch, heads, seqlen_q, V_DIM]
    slots,
    size,
    pages,
    new,
    splits,
    window_left,
    window_right,
    scale_log2,  # scale * log2(e)
    softcap_in,
    softcap_out,
    GROUP: tl.constexpr,  # heads that share a key head; a variable would stay in registers
    PAGE: tl.constexpr,  # the rows of a page if there is a table
    MERGED: tl.constexpr,  # whether split_kv_merge_kernel stores the results
    SOFTCAP: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    UNIT: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Compute one block of rows of a split.

    The grid is one-dimensional: programs of the same keys are adjacent, then those of a sequence.
    """
    rows = seqlen_q * GROUP
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    i_split = tl.program_id(0) // row_blocks % splits
    i_tile = tl.program_id(0) // row_blocks // splits
    i_batch = (i_tile // heads_kv).to(tl.int64)
    i_head = (i_tile % heads_kv).to(tl.int64)
    first = tl.program_id(0) % row_blocks * BLOCK_ROWS
    first_q, count, _used = span(p_offsets_q, None, i_batch, seqlen_q, total_q)
    if p_offsets_q is not None:  # noqa: SIM102 - the outer one is for the compiler
        if first >= count * GROUP:
            return
    o_row = first + tl.arange(0, BLOCK_ROWS)
    o_query = o_row // GROUP
    o_member = i_head * GROUP + o_row % GROUP
    m_row = o_row < tl.minimum(rows, count * GROUP)
    begin = tl.zeros_like(i_batch)
    if p_begins is not None:
        begin = tl.load(p_begins + i_batch).to(tl.int64)
    room = size.to(tl.int64) * pages
    seqlen_k = size
    if p_lengths is not None:
        seqlen_k = tl.maximum(tl.load(p_lengths + i_batch), 0)
    missing = False
    if p_before is None:
        seqlen_k = tl.minimum(seqlen_k, size)
    else:  # more keys than there is room for give NaN; those outside are not read
        outside = (seqlen_k > 0) & ((begin < 0) | (begin + seqlen_k > room))
        missing = outside | (tl.load(p_before + i_batch).to(tl.int64) + new > room)
        seqlen_k = tl.where(outside, 0, seqlen_k)
    o_q = i_batch * q_batch + (first_q + o_query).to(tl.int64) * q_row + o_member * q_head
    b_q = _load_rows(p_q + o_q * UNIT, m_row, K_DIM, BLOCK_K)
    b_slope = tl.zeros([BLOCK_ROWS], tl.float32)
    if p_slopes is not None:
        p_slope = p_slopes + i_batch * slopes_batch + o_member
        b_slope = tl.load(p_slope, mask=m_row, other=0.0) * LOG2E
    b_bias = None
    if p_bias is not None:
        b_bias = p_bias + (i_batch * bias_batch + o_member * bias_head)[:, None]
    slot = i_batch
    if p_slots is not None:
        slot = tl.load(p_slots + i_batch).to(tl.int64)
    if p_table is not None:
        p_table += i_batch * table_row
    p_k += i_head * k_head * UNIT
    p_v += i_head * v_head * UNIT

    # The keys that some row of the block sees, from `start` to `stop`, in blocks of this split.
    start = 0
    stop = seqlen_k
    diagonal = seqlen_k - count
    if RIGHT:
        last = tl.minimum((first + BLOCK_ROWS - 1) // GROUP, count - 1)
        stop = tl.minimum(stop, tl.maximum(last + diagonal + window_right + 1, 0))
    if LEFT:
        start = tl.maximum(first // GROUP + diagonal - window_left, 0) // BLOCK_KEYS * BLOCK_KEYS
    blocks = tl.cdiv(tl.maximum(stop - start, 0), BLOCK_KEYS)
    if MERGED:
        share = tl.cdiv(blocks, splits) * BLOCK_KEYS
        start += i_split * share
        stop = tl.minimum(stop, start + share)

    b_max = tl.full([BLOCK_ROWS], MIN_RUNNING_MAX, tl.float32)
    b_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    b_acc = tl.zeros([BLOCK_ROWS, BLOCK_V], tl.float32)
    for i_key in range(start, stop, BLOCK_KEYS):
        o_key = i_key + tl.arange(0, BLOCK_KEYS)
        m_key = o_key < stop
        o_place = begin + o_key
        b_slot = slot + tl.zeros_like(o_place)
        if p_table is not None:
            p_page = p_table + o_place // PAGE * table_page
            b_slot = tl.load(p_page, mask=m_key, other=0).to(tl.int64)
            o_place = o_place % PAGE
        m_slot = (b_slot >= 0) & (b_slot < slots)
        o_k = b_slot * k_slot + o_place * k_row
        b_k = _load_rows(p_k + o_k * UNIT, m_key & m_slot, K_DIM, BLOCK_K)
        b_s, _derivative = modified(
            tl.dot(b_q, tl.trans(b_k)), o_query[:, None], o_key[None, :], diagonal, count,
            seqlen_k, scale_log2, softcap_in, softcap_out, b_bias, bias_query.to(tl.int64),
            b_slope[:, None], SOFTCAP, p_slopes is not None,
        )  # fmt: skip
        m_visible = visible(
            o_query[:, None], o_key[None, :], diagonal, stop, window_left, window_right, LEFT, RIGHT
        )
        # A page that the cache does not have gives NaN, not another sequence's keys.
        b_s = tl.where(m_slot[None, :], b_s, float("nan"))
        b_s = tl.where(m_visible, b_s, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new_max[:, None])
        b_rescale = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
        b_max = b_new_max
        o_v = b_slot * v_slot + o_place * v_row
        b_v = _load_rows(p_v + o_v * UNIT, m_key & m_slot, V_DIM, BLOCK_V)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_rescale[:, None])

    if p_before is not None:
        b_sum = tl.where(missing, float("nan"), b_sum)
    b_scale = 1.0
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + o_member, mask=m_row, other=0.0).to(tl.float32) * LOG2E
        b_max, b_before = tl.maximum(b_max, b_sink), b_max
        b_scale = tl.exp2(b_before - b_max)
        b_sum = b_sum * b_scale + tl.exp2(b_sink - b_max)
    b_out = b_acc * (b_scale / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
    b_lse = tl.where(b_sum == 0.0, float("-inf"), b_max + tl.log2(b_sum))
    heads = heads_kv * GROUP
    o_lse = (i_batch * heads + o_member) * seqlen_q + o_query
    o_out = (i_batch * seqlen_q + o_query) * heads + o_member
    o_out = tl.where(heads_first != 0, o_lse, o_out) * V_DIM
    if MERGED:
        o_lse = (i_tile.to(tl.int64) * splits + i_split) * rows + o_row
        o_out = o_lse * V_DIM
    else:
        b_lse = b_lse / LOG2E
    if p_lse is not None:
        tl.store(p_lse + o_lse, b_lse, mask=m_row)
    o_dim = tl.arange(0, BLOCK_V)
    tl.store(
        p_out + o_out[:, None] + o_dim[None, :],
        b_out.to(p_out.dtype.element_ty),
        mask=m_row[:, None] & (o_dim < V_DIM)[None, :],
    )


@triton.jit
def _sequence_of(p_offsets, batch, total, i_row):
    """The sequence of a row, its first row, and the row after its last: the last that began."""
    i_sequence = 0
    after = batch
    while after - i_sequence > 1:
        middle = (i_sequence + after) // 2
        begins = span(p_offsets, None, middle, 0, total)[0] <= i_row
        i_sequence = tl.where(begins, middle, i_sequence)
        after = tl.where(begins, after, middle)
    first, count, _ = span(p_offsets, None, i_sequence, 0, total)
    return i_sequence, first, first + count


@triton.jit(
    do_not_specialize=(
        *("batch", "seqlen_q", "total_q", "heads_kv", "heads_first", "group", "splits"),
    )
)
def split_kv_merge_kernel(
    p_out,  # [batch, seqlen_q, heads, V_DIM] or [total_q, heads, V_DIM] contiguous, written
    p_lse,  # [batch, heads, seqlen_q] or [heads, total_q] float32, written; or None
    p_outs,  # as split_kv_kernel writes them
    p_lses,
    p_sinks,
    p_offsets_q,
    batch,
    seqlen_q,
    total_q,
    heads_kv,
    heads_first,
    group,
    splits,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Merge the splits of a query of one head; the grid is one-dimensional.

    Queries of no sequence give 0 and -inf, those beyond `seqlen_q`, which were not computed, NaN.
    """
    heads = heads_kv * group
    i_row = tl.program_id(0) // heads  # of all sequences
    i_head = tl.program_id(0) % heads
    i_batch = i_row // seqlen_q
    i_query = i_row % seqlen_q
    exists = True
    o_lse = (i_batch.to(tl.int64) * heads + i_head) * seqlen_q + i_query
    if p_offsets_q is not None:
        i_batch, first_q, end = _sequence_of(p_offsets_q, batch, total_q, i_row)
        i_query = i_row - first_q
        exists = (i_row >= first_q) & (i_row < end)
        o_lse = i_head.to(tl.int64) * total_q + i_row
    o_split = tl.arange(0, BLOCK_SPLITS)
    o_dim = tl.arange(0, BLOCK_V)
    i_tile = i_batch.to(tl.int64) * heads_kv + i_head // group
    o_part = ((i_tile * splits + o_split) * seqlen_q + i_query) * group + i_head % group
    m_part = (o_split < splits) & exists & (i_query < seqlen_q)
    b_lse = tl.load(p_lses + o_part, mask=m_part, other=float("-inf"))
    m_seen = b_lse != float("-inf")
    base = tl.max(b_lse, 0)
    sink = float("-inf")
    if p_sinks is not None:
        sink = tl.load(p_sinks + i_head).to(tl.float32) * LOG2E
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    b_weight = tl.where(m_seen, tl.exp2(b_lse - base), 0.0)
    total = tl.sum(b_weight, 0)
    if p_sinks is not None:
        total += tl.where(exists, tl.exp2(sink - base), 0.0)
    total = tl.where(exists & (i_query >= seqlen_q), float("nan"), total)
    b_outs = tl.load(
        p_outs + o_part[:, None] * V_DIM + o_dim[None, :],
        mask=m_seen[:, None] & (o_dim < V_DIM)[None, :],
        other=0.0,
    )
    b_out = tl.sum(b_outs * b_weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    if p_lse is not None:
        lse = tl.where(total == 0.0, float("-inf"), (base + tl.log2(total)) / LOG2E)
        tl.store(p_lse + o_lse, lse)
    o_out = tl.where(heads_first != 0, o_lse, i_row.to(tl.int64) * heads + i_head) * V_DIM
    tl.store(p_out + o_out + o_dim, b_out.to(p_out.dtype.element_ty), mask=o_dim < V_DIM)
