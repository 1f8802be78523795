"""`merge_attentions` with the signature of xformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from flashvar.errors import ShapeError
from flashvar.integrations.xformers.output import check_dtype
from flashvar.ops.arguments import as_bool, check_strided
from flashvar.ops.merge_states.api import merge_states
from flashvar.ops.merge_states.inputs import listed

__all__ = ["merge_attentions"]

Parts: TypeAlias = Sequence[torch.Tensor] | torch.Tensor


def merge_attentions(
    attn_split: Parts,
    lse_split: Parts,
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over all keys, from attentions of the same queries over disjoint sets of keys.

    Args:
        attn_split: The outputs, [batch, seqlen, heads, head_dim] or [batch, seqlen, groups, heads,
            head_dim] each; or one tensor with the parts stacked in dimension 0.
        lse_split: Their log-sum-exps, [batch, heads, seqlen] or [batch, groups, heads, seqlen]
            each; or one tensor with the parts stacked in dimension 0.
        write_lse: Also return the log-sum-exp; otherwise None is returned in its place.
        output_dtype: The dtype of the output; that of the parts by default.

    Returns:
        The output and its log-sum-exp, in the shapes of a part. Both have gradients.

    Raises:
        InvalidInputError: as `flashvar.merge_states`.
        BackendUnavailableError: as `flashvar.merge_states`.
    """
    check_dtype(output_dtype, "the parts")
    write_lse = as_bool("write_lse", write_lse)
    outs, lses = attn_split, lse_split
    if isinstance(outs, torch.Tensor) is not isinstance(lses, torch.Tensor):
        outs, lses = listed("attn_split", outs), listed("lse_split", lses)
    groups = _groups(outs)
    if groups is not None:
        outs, lses = _without_groups(outs, 2), _without_groups(lses, 1)
    out, lse = merge_states(outs, lses)
    if groups is not None:
        out, lse = out.unflatten(2, groups), lse.unflatten(1, groups)
    return out if output_dtype is None else out.to(output_dtype), lse if write_lse else None


def _groups(outs: Parts) -> tuple[int, int] | None:
    """Groups and heads of each part; None without groups."""
    stacked = isinstance(outs, torch.Tensor)
    for one in [outs] if isinstance(outs, torch.Tensor) else listed("attn_split", outs):
        check_strided("attn_split", one)
        if one.dim() - stacked not in (4, 5):
            raise ShapeError(
                "attn_split must have parts of 4 or 5 dimensions, found a part of "
                f"{one.dim() - stacked}: [batch, seqlen, heads, head_dim] is the common form"
            )
        if one.dim() - stacked == 5:
            return (one.shape[-3], one.shape[-2])
    return None


def _without_groups(parts: Parts, at: int) -> Parts:
    """Groups of heads as heads."""
    if isinstance(parts, torch.Tensor):
        stacked: torch.Tensor = parts.flatten(at + 1, at + 2)
        return stacked
    return [one.flatten(at, at + 1) for one in parts]
