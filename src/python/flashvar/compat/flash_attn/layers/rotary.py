"""Rotary position embeddings (Su et al. 2021) as `flash_attn.layers.rotary` has them."""

from __future__ import annotations

import torch

from flashvar.errors import ShapeError

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func"]


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Turn the first 2 * r entries of each row by the angles of its position, in float32.

    Args:
        x: [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim] with cu_seqlens.
        cos: [positions, r] with 2 * r <= head_dim. Positions beyond it are not turned.
        sin: Like cos.
        interleaved: Entries 2 i and 2 i + 1 belong together, rather than i and i + r.
        inplace: Write to x, and return it.
        seqlen_offsets: Position of the first row of every sequence, or of each, [batch].
        cu_seqlens: int32 [batch + 1], offsets of the packed sequences.
        max_seqlen: Longest packed sequence; not needed.

    Returns:
        Shape and dtype of x.

    Raises:
        ShapeError: cos and sin do not fit x.
    """
    half = cos.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * half > x.shape[-1]:
        raise ShapeError(
            f"cos and sin must have one shape (positions, at most {x.shape[-1] // 2}), got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}: pass one entry for each pair"
        )
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    known = (positions < cos.shape[0])[..., None]
    row = positions.clamp(max=max(cos.shape[0] - 1, 0))
    # One entry for each row and pair, the same for all heads.
    c = torch.where(known, cos[row].float(), 1.0)[..., None, :]
    s = torch.where(known, sin[row].float(), 0.0)[..., None, :]
    turned = x[..., : 2 * half].float()
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        turned = torch.cat((first * c - second * s, second * c + first * s), -1)
    turned = turned.to(x.dtype)
    if inplace:
        x[..., : 2 * half].copy_(turned)
        return x
    return torch.cat((turned, x[..., 2 * half :]), -1)


apply_rotary_emb_func = apply_rotary_emb


def _positions(
    x: torch.Tensor, seqlen_offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """The position of each row: [batch or 1, seqlen], or [total] of packed rows."""
    rows = torch.arange(x.shape[0 if cu_seqlens is not None else 1], device=x.device)
    if cu_seqlens is None:
        offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
        return rows + offsets
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(cu_seqlens.shape[0] - 1)
    return rows - cu_seqlens[sequence] + offsets[sequence]
