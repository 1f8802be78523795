"""The launch of the Triton kernel of rotary position embeddings."""

from __future__ import annotations

from typing import Final

import torch

from flashvar.backends.triton.blocks import power_of_2
from flashvar.backends.triton.repeated import on_device, start
from flashvar.backends.triton.rotary.kernel import rotary_kernel
from flashvar.ops.rotary.rotation import Rotation

# Elements of a 16-bit dtype in 16 bytes, the width of a vectorized load.
_LOAD_ELEMENTS: Final = 8
_PAIRS_OF_BLOCK: Final = 128 * _LOAD_ELEMENTS  # a load for each thread of 4 warps
_MAX_BLOCK_HEADS: Final = 8


def launch(out: torch.Tensor, x: torch.Tensor, rotation: Rotation, rotated_heads: int) -> None:
    """Rotate the first heads of x and copy the others, to out, which may be x."""
    cos, sin, offsets, cu_seqlens, offset, interleaved, conjugate = rotation
    cos, sin = (table if table.stride(1) == 1 else table.contiguous() for table in (cos, sin))
    heads, head_dim = x.shape[-2:]
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        rows, out_batch, x_batch = batch * seqlen, out.stride(0), x.stride(0)
    else:
        batch, seqlen = cu_seqlens.shape[0] - 1, x.shape[0]
        rows, out_batch, x_batch = seqlen, 0, 0
    if rows == 0 or heads == 0 or head_dim == 0:
        return
    pairs = cos.shape[1]
    block_pairs = max(power_of_2(pairs), _LOAD_ELEMENTS)
    block_heads = min(power_of_2(heads), _MAX_BLOCK_HEADS)
    block_rows = max(_PAIRS_OF_BLOCK // (block_pairs * block_heads), 1)
    blocks = -(-rows // block_rows) * -(-heads // block_heads)
    with on_device(x.device.index):  # Triton launches on the current device
        start(rotary_kernel, (blocks,))(
            out,
            x,
            cos,
            sin,
            None if offsets is None else offsets.contiguous(),
            None if cu_seqlens is None else cu_seqlens.contiguous(),
            out_batch,
            *out.stride()[-3:],
            x_batch,
            *x.stride()[-3:],
            cos.stride(0),
            sin.stride(0),
            rows,
            seqlen,
            batch,
            1 << (batch - 1).bit_length() - 1 if batch > 1 else 0,
            cos.shape[0],
            offset,
            heads,
            rotated_heads,
            PAIRS=pairs,
            HEAD_DIM=head_dim,
            INTERLEAVED=interleaved,
            CONJUGATE=conjugate,
            COPY=out is not x,
            BLOCK_ROWS=block_rows,
            BLOCK_HEADS=block_heads,
            BLOCK_PAIRS=block_pairs,
            num_warps=4,
            enable_fp_fusion=True,
        )
