"""The launch of the Triton kernel that writes new keys and values into a KV cache."""

from __future__ import annotations

from typing import Final

import torch

from flashvar.backends.triton.attention.append_kernel import append_kernel
from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.repeated import on_device, start
from flashvar.ops.attention.cache import Cache

# Elements of a 16-bit dtype in a load of 16 bytes for each thread of 4 warps.
_MAX_BLOCK: Final = 128 * 8
_BLOCK_PAGES: Final = 128


def launch(
    cache: Cache,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    before: torch.Tensor,
    begins: torch.Tensor | None,
) -> torch.Tensor:
    """As `append`, where k and v do not share memory with the cache."""
    batch = len(before)
    lengths = torch.empty(batch, dtype=torch.int32, device=before.device)
    new = 0 if k is None else k.shape[1]
    if k is None or new == 0:
        k = v = None
    if batch == 0:
        return lengths
    slots, size, heads, k_dim = cache.k.shape
    v_dim = cache.v.shape[3]
    pages = 1 if cache.table is None else cache.table.shape[1]
    with on_device(before.device.index):  # Triton launches on the current device
        start(append_kernel, (batch * max(new, 1),))(
            lengths,
            before.contiguous(),
            None if begins is None else begins.contiguous(),
            None if cache.slots is None else cache.slots.contiguous(),
            cache.table,
            cache.k,
            cache.v,
            k,
            v,
            *((0, 0) if cache.table is None else cache.table.stride()),
            *cache.k.stride(),
            *cache.v.stride(),
            *((0, 0, 0) if k is None else k.stride()[:3]),
            *((0, 0, 0) if v is None else v.stride()[:3]),
            new,
            slots,
            size,
            pages,
            HEADS=heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            BLOCK_K=min(power_of_2(heads * k_dim), _MAX_BLOCK),
            BLOCK_V=min(power_of_2(heads * v_dim), _MAX_BLOCK),
            BLOCK_PAGES=_BLOCK_PAGES,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return lengths
