"""Whether elements of a tensor share memory, which decides if it may be written in place."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashvar.errors import LayoutError
from flashvar.ops.sequences import shares_memory


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4])
def test_every_stride(dimensions: int) -> None:
    found, expected = [], []
    for _ in range(300):
        shape = torch.randint(1, 5, (dimensions,)).tolist()
        strides = torch.randint(0, 15, (dimensions,)).tolist()
        places = itertools.product(*map(range, shape))
        addresses = [sum(map(int.__mul__, place, strides)) for place in places]
        expected.append(len(set(addresses)) < len(addresses))
        found.append(shares_memory(torch.empty(200).as_strided(shape, strides)))
    assert found == expected


def test_interleaved_elements_do_not_share_memory() -> None:
    assert not shares_memory(torch.empty(9).as_strided((3, 2), (2, 3)))
    assert shares_memory(torch.empty(9).as_strided((3, 2), (2, 4)))


def test_overlapping_rows_are_not_rotated_in_place() -> None:
    table = torch.ones(4, 2)
    windows = torch.randn(9).as_strided((1, 4, 1, 4), (9, 1, 1, 1))
    with pytest.raises(LayoutError, match="must not share memory between entries"):
        apply_rotary_emb(windows, table, table, inplace=True)
