"""The Triton kernel that writes new keys and values into a KV cache: a program per new row.

It decides on the device which sequences are padding: those whose length, slot or page of a key is
negative. They have no keys, and nothing is written for them.
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

# They change from call to call: one kernel runs all of their values.
_RUNTIME: Final = ("new", "slots", "size", "pages")


@triton.jit(do_not_specialize=_RUNTIME)
def append_kernel(
    p_lengths,  # [batch] int32, written: how many keys of each sequence are used
    p_before,  # [batch], the position of the first new key of each sequence
    p_begins,  # [batch], the position of its first key that is used; None: 0
    p_slots,  # [batch]; None: the number of the sequence
    p_table,  # [batch, pages]; None: a slot is one page
    p_k_cache,  # [slots, size, HEADS, K_DIM], written
    p_v_cache,  # [slots, size, HEADS, V_DIM], written
    p_k,  # [batch, new, HEADS, K_DIM]; None: only the lengths are wanted
    p_v,  # [batch, new, HEADS, V_DIM]
    table_row,
    table_page,
    k_cache_slot,
    k_cache_row,
    k_cache_head,
    k_cache_dim,
    v_cache_slot,
    v_cache_row,
    v_cache_head,
    v_cache_dim,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    new,
    slots,
    size,
    pages,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Write one row. The grid is [batch * new], or [batch] without new keys."""
    rows = tl.maximum(new, 1)
    i_batch = (tl.program_id(0) // rows).to(tl.int64)
    i_row = tl.program_id(0) % rows
    capacity = size.to(tl.int64) * pages
    before = tl.load(p_before + i_batch).to(tl.int64)
    start = tl.minimum(tl.maximum(before, 0), capacity)
    end = tl.minimum(start + new, capacity)
    begin = tl.zeros_like(start)
    if p_begins is not None:
        begin = tl.load(p_begins + i_batch).to(tl.int64)
    # The least length, slot or page: negative for padding.
    least = before
    slot = i_batch
    if p_slots is not None:
        slot = tl.load(p_slots + i_batch).to(tl.int64)
        least = tl.minimum(least, slot)
    if p_table is not None:
        p_table += i_batch * table_row
        b_least = tl.zeros([BLOCK_PAGES], tl.int64)
        first = (tl.maximum(begin, 0) // size).to(tl.int32)
        last = ((end + size - 1) // size).to(tl.int32)
        for at in range(first, last, BLOCK_PAGES):
            o_page = at + tl.arange(0, BLOCK_PAGES)
            p_page = p_table + o_page.to(tl.int64) * table_page
            b_least = tl.minimum(b_least, tl.load(p_page, mask=o_page < last, other=0).to(tl.int64))
        least = tl.minimum(least, tl.min(b_least, 0))
    used = tl.where(least >= 0, end - begin, 0)
    tl.store(p_lengths + i_batch, used.to(tl.int32), mask=i_row == 0)
    if p_k is not None:
        row = start + i_row
        m_row = (least >= 0) & (row < capacity)
        if p_table is not None:
            slot = tl.load(p_table + row // size * table_page, mask=m_row, other=0).to(tl.int64)
            row = row % size
        m_row = m_row & (slot >= 0) & (slot < slots)
        p_k += i_batch * k_batch + i_row.to(tl.int64) * k_row
        p_v += i_batch * v_batch + i_row.to(tl.int64) * v_row
        p_k_cache += slot * k_cache_slot + row * k_cache_row
        p_v_cache += slot * v_cache_slot + row * v_cache_row
        copy_heads(
            p_k_cache, p_k, k_cache_head, k_cache_dim, k_head, 1, m_row, m_row,
            HEADS, K_DIM, BLOCK_K,
        )  # fmt: skip
        copy_heads(
            p_v_cache, p_v, v_cache_head, v_cache_dim, v_head, 1, m_row, m_row,
            HEADS, V_DIM, BLOCK_V,
        )  # fmt: skip


@triton.jit
def copy_heads(
    p_out,
    p_x,
    out_head,
    out_dim,
    x_head,
    x_dim,
    m_out,
    m_x,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy [HEADS, DIM] where `m_out`, or write NaN there where not `m_x`."""
    for first in range(0, HEADS * DIM, BLOCK):
        o_x = first + tl.arange(0, BLOCK)
        m_exists = o_x < HEADS * DIM
        i_head = (o_x // DIM).to(tl.int64)
        i_dim = (o_x % DIM).to(tl.int64)
        p_from = p_x + i_head * x_head + i_dim * x_dim
        b_x = tl.load(p_from, mask=m_exists & m_x, other=float("nan"))
        tl.store(p_out + i_head * out_head + i_dim * out_dim, b_x, mask=m_exists & m_out)
