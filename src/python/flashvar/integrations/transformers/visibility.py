"""Visibility, the description of a mask in terms of the kernels: which keys each query sees."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashvar.integrations.torch.attribute import splits_sequences
from flashvar.integrations.transformers.rows import (
    Rows,
    has_holes,
    numbers_of,
    rows_of,
    rows_of_keys,
)
from flashvar.ops.dispatch_modes import have_values


class Visibility(NamedTuple):
    """The keys that each query sees."""

    causal: bool
    window: tuple[int, int]  # as `window_size`
    keys: int  # keys in use; the rest of a static cache is not filled yet
    rows: Rows | None = None  # the rows to pack
    # [batch or 1, heads or 1, seqlen_q or 1, keys]: bool, or added to the scores.
    bias: torch.Tensor | None = None
    plain: bool = False  # True: only the causal mask, or no mask at all
    by_mask: bool = False  # True: the caller's mask separates sequences, not their positions

    def to(self, device: torch.device) -> Visibility:
        """The visibility with its tensors on another device."""
        rows, bias = self.rows, self.bias
        return self._replace(
            rows=None if rows is None else rows.to(device),
            bias=None if bias is None else bias.to(device),
        )


def bounded_window(window: tuple[int, int], keys: int) -> tuple[int, int]:
    """The window; sides that hide no key become unbounded."""
    if splits_sequences():  # the whole sequence has more keys
        return window
    left, right = (-1 if side >= keys - 1 else side for side in window)
    return left, right


def padding_visibility(
    numbers: torch.Tensor, seqlen_q: int, causal: bool, window: tuple[int, int]
) -> Visibility:
    """That of sequence numbers [batch, keys]: 0 is padding, each sequence has its own number.

    With as many queries as keys, rows are packed. If not causal, all queries are packed, because
    they may be of another sequence (cross attention). With a cache, packing would copy all keys for
    few queries, so a bias hides the padding. A bias is also used where the numbers have no values:
    while a graph is traced, which must not depend on the number of rows, and under vmap.
    """
    keys = numbers.shape[1]
    if seqlen_q == keys and have_values(numbers):
        rows = rows_of(numbers) if causal else rows_of_keys(numbers)
        if rows is None or window == (-1, -1) or (causal and not has_holes(rows)):
            return Visibility(causal, window, keys, rows)
    bias = torch.zeros(numbers.shape, device=numbers.device)
    bias = bias.masked_fill(numbers == 0, -torch.inf)
    return Visibility(causal, window, keys, bias=bias[:, None, None])


def packed_visibility(
    sequences: torch.Tensor, seen: torch.Tensor | None, causal: bool, window: tuple[int, int]
) -> Visibility | None:
    """The visibility of packed sequences, by their numbers [batch, keys]; `seen` is 0 for padding.

    None if the numbers do not ascend, since rows of a sequence may then be apart; or if padding is
    inside a sequence with a window, since packing would change the distances.
    """
    steps = sequences.diff()
    if bool((steps < 0).any()):
        return None
    numbers = torch.nn.functional.pad(steps != 0, (1, 0)).cumsum(-1) + 1
    rows = rows_of(numbers if seen is None else numbers * seen)
    if rows is not None and window != (-1, -1) and has_holes(rows):
        return None
    return Visibility(causal, window, sequences.shape[1], rows)


def visible(
    visibility: Visibility, batch: int, seqlen_q: int, device: torch.device
) -> torch.Tensor:
    """The keys that each query sees without the bias, bool [batch, 1, seqlen_q, keys]."""
    keys = visibility.keys
    key = torch.arange(keys, device=device)
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + keys - seqlen_q
    left, right = visibility.window
    right = 0 if visibility.causal else right
    seen = torch.ones((1, 1, seqlen_q, keys), dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (key >= diagonal - left)
    if right >= 0:
        seen = seen & (key <= diagonal + right)
    if visibility.rows is not None:
        of_queries, of_keys = numbers_of(visibility.rows, batch, seqlen_q, keys)
        same = of_queries[:, None, :, None] == of_keys[:, None, None]
        seen = seen & same & (of_keys != 0)[:, None, None]
    return seen.expand(batch, -1, -1, -1)


def as_bias(visibility: Visibility, batch: int, seqlen_q: int, like: torch.Tensor) -> torch.Tensor:
    """All of it as one bias, [batch, heads or 1, seqlen_q, keys] in the dtype of `like`."""
    bias = visibility.bias
    seen = visible(visibility, batch, seqlen_q, like.device)
    zeros = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
    hidden = zeros.masked_fill(~seen, -torch.inf)
    return hidden if bias is None else hidden + additive(bias, like.dtype)


def additive(mask: torch.Tensor, dtype: torch.dtype, hidden: float = -torch.inf) -> torch.Tensor:
    """A mask of four dimensions as a bias of the scores, in a dtype."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, hidden)


def added(mask: Any, dtype: torch.dtype) -> Any:
    """A mask of a caller, added to the scores if it is bool and of four dimensions.

    It is then like the masks of eager attention: 0 for visible keys, else the lowest number.
    """
    # The dtype first: Dynamo traces no methods of a LazyMask, which is never bool.
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == 4:
        return additive(mask, dtype, torch.finfo(dtype).min)
    return mask
