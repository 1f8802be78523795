"""The dropout mask, the same as in the kernels (src/cuda/attention/dropout.cuh).

Philox 4x32 with 7 rounds (Salmon et al., 2011) gives eight half words, one for each weight at rows
r, r + 8 and columns c, c + 1, c + 8, c + 9 of a 16 x 16 fragment, where c is even. Words are held
in int64: a product of two words wraps, which leaves its 64 bits correct.
"""

from __future__ import annotations

import struct
from typing import Final

import torch

_ROUNDS: Final = 7
_WORD: Final = 0xFFFFFFFF
_HALF_WORDS: Final = 2**16
_FACTORS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random words for each counter; all are 32-bit words in int64 tensors, and broadcast."""
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _FACTORS[0])
        high1, low1 = _multiply(c2, _FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def keeps(
    rng_state: torch.Tensor,
    head_indices: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    dropout_p: float,
) -> torch.Tensor:
    """True where a weight is kept, [*head_indices.shape, rows, columns].

    `head_indices` are batch index * heads_q + head; `rows` and `columns` are positions in the
    sequence.
    """
    seed, offset = rng_state.unbind()
    key = (seed & _WORD, (seed >> 32) & _WORD)
    i, j = rows[:, None], columns
    counter = (
        i // 16 * 8 + i % 8,
        j // 16 * 4 + j % 8 // 2,
        (head_indices & _WORD)[..., None, None],
        offset & _WORD,
    )
    words = philox(counter, key)
    low, even = i // 8 % 2 == 0, j % 2 == 0
    word = torch.where(
        low, torch.where(even, words[0], words[1]), torch.where(even, words[2], words[3])
    )
    return torch.where(j // 8 % 2 == 0, word << 16 & _WORD, word) >= threshold(dropout_p)


def threshold(dropout_p: float) -> int:
    """The smallest half word that is kept, shifted to the upper half of a word."""
    return _dropped(dropout_p) << 16


def kept_scale(dropout_p: float) -> float:
    """The factor of the kept probabilities, 1 / (1 - p)."""
    return _HALF_WORDS / (_HALF_WORDS - _dropped(dropout_p))


def _dropped(dropout_p: float) -> int:
    """How many of the 2^16 half words are dropped, at most all but one.

    Computed from the float32 nearest to the probability, as in the kernels.
    """
    return min(int(_float32(dropout_p) * _HALF_WORDS + 0.5), _HALF_WORDS - 1)


def _float32(value: float) -> float:
    """The float32 nearest to a number. Uses no tensor: it would be on the default device."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    product = word * factor
    return (product >> 32) & _WORD, product & _WORD
