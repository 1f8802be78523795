"""The dropped weights are the same everywhere: Philox's known answers, and what follows of them."""

from __future__ import annotations

import pytest
import torch
from philox import kept

import flashvar
from flashvar.backends.reference.attention.dropout import keeps, kept_scale, philox, threshold

# Counter, key and result of Philox 4x32 with 7 rounds, from Random123's known answers.
KNOWN = {
    "zeros": (
        (0, 0, 0, 0),
        (0, 0),
        (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
    ),
    "ones": (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    ),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name: str) -> None:
    counter, key, expected = KNOWN[name]
    a, b, c, d = (torch.tensor(word) for word in counter)
    words = philox((a, b, c, d), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("seed", [0, 5, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("offset", [0, 2**32 + 3, -2])
def test_mask_is_that_of_the_oracle(seed: int, offset: int) -> None:
    batch, heads, rows, columns = 2, 3, 37, 41
    places = torch.arange(batch * heads).unflatten(0, (batch, heads))
    state = torch.tensor([seed, offset])
    found = keeps(state, places, torch.arange(rows), torch.arange(columns), 0.3)
    assert torch.equal(found, kept((batch, heads, rows, columns), 0.3, seed, offset, 0))


def test_some_rows_are_the_same_as_in_all_rows() -> None:
    state, places = torch.tensor([9, 4]), torch.arange(2)
    every = keeps(state, places, torch.arange(64), torch.arange(50), 0.5)
    some = keeps(state, places, torch.arange(13, 40), torch.arange(50), 0.5)
    assert torch.equal(some, every[:, 13:40])


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_share_of_dropped_weights(dropout_p: float) -> None:
    kept_ones = keeps(
        torch.tensor([1, 0]), torch.arange(8), torch.arange(256), torch.arange(256), dropout_p
    )
    assert abs(1 - kept_ones.double().mean() - dropout_p) < 3e-3


@pytest.mark.parametrize(
    ("dropout_p", "dropped"),
    [(0.5, 2**15), (0.1, 6554), (1e-6, 0), (1e-5, 1), (1 - 2**-20, 2**16 - 1)],
)
def test_probability_is_rounded_to_half_words(dropout_p: float, dropped: int) -> None:
    assert threshold(dropout_p) == dropped << 16
    assert kept_scale(dropout_p) == 2**16 / (2**16 - dropped)


def test_state_is_drawn_from_the_generator_of_torch() -> None:
    q = torch.randn(1, 40, 2, 8)
    torch.manual_seed(3)
    first, second = (flashvar.attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    torch.testing.assert_close(flashvar.attention(q, q, q, dropout_p=0.5), first, rtol=0, atol=0)
    assert not torch.equal(first, second)


def test_log_sum_exp_knows_nothing_of_dropout() -> None:
    q = torch.randn(1, 40, 2, 8)
    _, lse = flashvar.attention(q, q, q, dropout_p=0.5, return_lse=True)
    _, expected = flashvar.attention(q, q, q, return_lse=True)
    torch.testing.assert_close(lse, expected)


def test_weights_keep_their_sum_on_average() -> None:
    q, k = torch.zeros(1, 64, 4, 8), torch.zeros(1, 4096, 4, 8)
    out = flashvar.attention(q, k, torch.ones(1, 4096, 4, 8), dropout_p=0.2)
    assert abs(out.mean() - 1) < 2e-3
