"""Which weights dropout keeps, from the definition: Philox 4x32 with 7 rounds, in numpy.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). The eight half words of one
call decide P at rows r, r + 8 and columns c, c + 1, c + 8, c + 9 of a 16 x 16 fragment, where c is
even: words are those of rows, then of odd columns, upper halves those of columns from 8 on.
"""

from __future__ import annotations

import numpy as np
import torch

_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def philox(counter: np.ndarray, key: tuple[int, int], rounds: int = 7) -> np.ndarray:
    """Four random words [4, ...] for each counter [4, ...], all below 2^32 in uint64."""
    c0, c1, c2, c3 = counter.astype(np.uint64)
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(rounds):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> np.uint64(32)) ^ c1 ^ k0,
            right & _LOW,
            (left >> np.uint64(32)) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def kept(
    shape: tuple[int, int, int, int], dropout_p: float, seed: int, offset: int, first_place: int = 0
) -> torch.Tensor:
    """[batch, heads, seqlen_q, seqlen_k]: True where a weight is kept.

    `first_place` is batch * heads + head of the first one, where this is a part of a call.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    place = (first_place + np.arange(batch * heads, dtype=np.uint64)) & _LOW
    i, j = np.arange(seqlen_q, dtype=np.uint64), np.arange(seqlen_k, dtype=np.uint64)
    two, four, eight, sixteen = (np.uint64(n) for n in (2, 4, 8, 16))
    grid = np.broadcast_arrays(
        (i // sixteen * eight + i % eight)[None, :, None],
        (j // sixteen * four + j % eight // two)[None, None, :],
        place[:, None, None],
        np.uint64(offset & 0xFFFFFFFF),
    )
    words = philox(np.stack(grid), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    number = two * (i // eight % two)[:, None] + (j % two)[None, :]
    word = np.take_along_axis(words, np.broadcast_to(number, words.shape[1:])[None].astype(int), 0)
    half = (word[0] >> (sixteen * (j // eight % two))) & np.uint64(0xFFFF)
    return torch.from_numpy(half >= dropped(dropout_p)).view(batch, heads, seqlen_q, seqlen_k)


def dropped(dropout_p: float) -> int:
    """How many of the 2^16 half words are dropped, never all."""
    return min(int(float(np.float32(dropout_p)) * 2**16 + 0.5), 2**16 - 1)
