"""Whether elements of a tensor share memory, which decides if it may be written in place."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashvar.errors import LayoutError
from flashvar.ops.sequences import overlap, shares_memory


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


def addresses(x: torch.Tensor) -> set[int]:
    places = itertools.product(*map(range, x.shape))
    return {x.storage_offset() + sum(map(int.__mul__, place, x.stride())) for place in places}


def test_two_tensors_of_any_strides() -> None:
    memory, found, expected = torch.empty(300), [], []
    same_memory = torch.from_numpy(memory.numpy())

    def view(whole: torch.Tensor) -> torch.Tensor:
        dimensions, first = torch.randint(1, 4, ()), torch.randint(0, 80, ())
        shape, strides = torch.randint(1, 5, (dimensions,)), torch.randint(0, 15, (dimensions,))
        return whole.as_strided(shape.tolist(), strides.tolist(), int(first))

    for whole in (memory, same_memory):
        for _ in range(300):
            x, y = view(memory), view(whole)
            expected.append(not addresses(x).isdisjoint(addresses(y)))
            found.append(overlap(x, y))
    assert found == expected
    assert {True, False} == set(expected)


def test_tensors_without_memory_share_none() -> None:
    x, y = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")
    assert not overlap(x, y)
    assert overlap(x, x[1:])
    assert not overlap(x[:1], x[1:])
    assert not overlap(x, x[:0])


def test_interleaved_elements_do_not_share_memory() -> None:
    assert not shares_memory(torch.empty(9).as_strided((3, 2), (2, 3)))
    assert shares_memory(torch.empty(9).as_strided((3, 2), (2, 4)))


def test_overlapping_rows_are_not_rotated_in_place() -> None:
    table = torch.ones(4, 2)
    windows = torch.randn(9).as_strided((1, 4, 1, 4), (9, 1, 1, 1))
    with pytest.raises(LayoutError, match="must not share memory between entries"):
        apply_rotary_emb(windows, table, table, inplace=True)
