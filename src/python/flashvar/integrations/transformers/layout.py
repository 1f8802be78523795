"""What a layer hands to the kernels in place of a mask."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashvar.integrations.torch.attribute import splits_sequences
from flashvar.integrations.transformers.rows import (
    Rows,
    has_holes,
    numbers_of,
    rows_of,
    rows_of_keys,
)


class Layout(NamedTuple):
    """Which keys a query sees."""

    causal: bool
    window: tuple[int, int]  # as `window_size`
    keys: int  # the others are yet to come
    rows: Rows | None = None  # pack these
    # [batch or 1, heads or 1, seqlen_q or 1, keys]: added to the scores, or bool.
    bias: torch.Tensor | None = None
    plain: bool = False  # known to be all keys, causal or not

    def to(self, device: torch.device) -> Layout:
        """The same, with its tensors on another device."""
        rows, bias = self.rows, self.bias
        return self._replace(
            rows=None if rows is None else rows.to(device),
            bias=None if bias is None else bias.to(device),
        )


def bounded(window: tuple[int, int], keys: int) -> tuple[int, int]:
    """The window, unbounded where it holds all keys."""
    if splits_sequences():  # there are more of them
        return window
    left, right = (-1 if side >= keys - 1 else side for side in window)
    return left, right


def padding_layout(
    numbers: torch.Tensor, seqlen_q: int, causal: bool, window: tuple[int, int]
) -> Layout:
    """The layout of numbers [batch, keys]: 0 is padding, each sequence has a number of its own.

    Where queries and keys are as many, rows are packed; all queries, if not causal, for they may
    be those of another sequence (cross attention). Elsewhere, with a cache, packing would copy all
    keys for a few queries, and hiding some costs nothing. So it does while a graph is traced, which
    must not depend on the number of rows.
    """
    keys = numbers.shape[1]
    if seqlen_q == keys and not torch.compiler.is_compiling():
        rows = rows_of(numbers) if causal else rows_of_keys(numbers)
        if rows is None or window == (-1, -1) or (causal and not has_holes(rows)):
            return Layout(causal, window, keys, rows)
    bias = torch.zeros(numbers.shape, device=numbers.device)
    bias = bias.masked_fill(numbers == 0, -torch.inf)
    return Layout(causal, window, keys, bias=bias[:, None, None])


def visible(layout: Layout, batch: int, seqlen_q: int, device: torch.device) -> torch.Tensor:
    """What each query sees, bool [batch, heads or 1, seqlen_q, keys]; a bias adds nothing else."""
    keys = layout.keys
    place = torch.arange(keys, device=device)
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + keys - seqlen_q
    left, right = layout.window
    right = 0 if layout.causal else right
    seen = torch.ones((1, 1, seqlen_q, keys), dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (place >= diagonal - left)
    if right >= 0:
        seen = seen & (place <= diagonal + right)
    if layout.rows is not None:
        of_queries, of_keys = numbers_of(layout.rows, batch, seqlen_q, keys)
        same = of_queries[:, None, :, None] == of_keys[:, None, None]
        seen = seen & same & (of_keys != 0)[:, None, None]
    return seen.expand(batch, -1, -1, -1)


def added(layout: Layout, batch: int, seqlen_q: int, like: torch.Tensor) -> torch.Tensor:
    """All of the layout as one bias, [batch, heads or 1, seqlen_q, keys] in dtype of `like`."""
    bias = layout.bias
    seen = visible(layout, batch, seqlen_q, like.device)
    zeros = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
    hidden = zeros.masked_fill(~seen, -torch.inf)
    return hidden if bias is None else hidden + additive(bias, like.dtype)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of four dimensions in the dtype, added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, -torch.inf)
