"""Copies of the keys and values of a cache into consecutive rows, for the compiled kernels."""
# Constants of the compiler are upper case, as in all of Triton.
# ruff: noqa: N803
# Triton's own language: no annotations that mypy could check.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from flashvar.backends.triton.attention.append_kernel import copy_heads
from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.repeated import on_device, start

if TYPE_CHECKING:
    from flashvar.ops.attention.cache import Cache

# Elements of a 16-bit dtype in a load of 16 bytes for each thread of 4 warps.
_MAX_BLOCK: Final = 128 * 8
# They change from call to call: one kernel runs all of their values.
_RUNTIME: Final = ("room", "slots", "size", "pages")


@triton.jit(do_not_specialize=_RUNTIME)
def gather_kernel(
    p_k,  # [batch, room, HEADS, K_DIM] contiguous, written
    p_v,  # [batch, room, HEADS, V_DIM] contiguous, written
    p_begins,  # [batch], the position of the first key of each sequence
    p_lengths,  # [batch], how many keys are copied
    p_slots,  # [batch]; None: the number of the sequence
    p_table,  # [batch, pages]; None: a slot is one page
    p_k_cache,  # [slots, size, HEADS, K_DIM]
    p_v_cache,  # [slots, size, HEADS, V_DIM]
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
    room,
    slots,
    size,
    pages,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Copy one row. The grid is [batch * room]. Rows that the cache does not have become NaN."""
    i_batch = (tl.program_id(0) // room).to(tl.int64)
    i_row = tl.program_id(0) % room
    if i_row >= tl.load(p_lengths + i_batch):
        return
    row = tl.load(p_begins + i_batch).to(tl.int64) + i_row
    m_row = (row >= 0) & (row < size.to(tl.int64) * pages)
    slot = i_batch
    if p_slots is not None:
        slot = tl.load(p_slots + i_batch).to(tl.int64)
    if p_table is not None:
        p_table += i_batch * table_row
        slot = tl.load(p_table + row // size * table_page, mask=m_row, other=0).to(tl.int64)
        row = row % size
    m_row = m_row & (slot >= 0) & (slot < slots)
    i_out = (i_batch * room + i_row) * HEADS
    p_k_cache += slot * k_cache_slot + row * k_cache_row
    p_v_cache += slot * v_cache_slot + row * v_cache_row
    copy_heads(
        p_k + i_out * K_DIM, p_k_cache, K_DIM, 1, k_cache_head, k_cache_dim, True, m_row,
        HEADS, K_DIM, BLOCK_K,
    )  # fmt: skip
    copy_heads(
        p_v + i_out * V_DIM, p_v_cache, V_DIM, 1, v_cache_head, v_cache_dim, True, m_row,
        HEADS, V_DIM, BLOCK_V,
    )  # fmt: skip


def launch(
    cache: Cache, begins: torch.Tensor, lengths: torch.Tensor, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Cache.read`; rows beyond the lengths are not written."""
    batch, (slots, size, heads, k_dim), v_dim = len(lengths), cache.k.shape, cache.v.shape[3]
    k = cache.k.new_empty(batch, room, heads, k_dim)
    v = cache.v.new_empty(batch, room, heads, v_dim)
    if batch * room == 0:
        return k, v
    with on_device(k.device.index):  # Triton launches on the current device
        start(gather_kernel, (batch * room,))(
            k,
            v,
            begins.contiguous(),
            lengths.contiguous(),
            None if cache.slots is None else cache.slots.contiguous(),
            cache.table,
            cache.k,
            cache.v,
            *((0, 0) if cache.table is None else cache.table.stride()),
            *cache.k.stride(),
            *cache.v.stride(),
            room,
            slots,
            size,
            1 if cache.table is None else cache.table.shape[1],
            HEADS=heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            BLOCK_K=min(power_of_2(heads * k_dim), _MAX_BLOCK),
            BLOCK_V=min(power_of_2(heads * v_dim), _MAX_BLOCK),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return k, v
