"""`flash_attn_with_kvcache` does not write new keys where other keys or values are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashvar.errors import InvalidInputError, LayoutError
from flashvar.flash_attn import flash_attn_with_kvcache

B, CAPACITY, HEADS, D = 2, 8, 2, 16
_WORDS = "k_cache and v_cache must not share memory if new keys are written, found"


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def append(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Any:
    q, k, v = (torch.ones(B, 1, HEADS, D, dtype=torch.float64) * number for number in (1, 2, 3))
    return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)


def caches_that_overlap() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    memory = made(B + 1, CAPACITY, HEADS, D)
    return {
        "one tensor": (memory, memory),
        "two views": (memory[:B], memory[:B]),
        "a slot of both": (memory[:B], memory[1:]),
        "two storages of one memory": (memory, torch.from_numpy(memory.numpy())),
    }


@pytest.mark.parametrize("kind", caches_that_overlap())
def test_caches_that_overlap_are_read_and_not_written(kind: str) -> None:
    k, v = caches_that_overlap()[kind]
    before = k.clone()
    with pytest.raises(LayoutError, match=_WORDS):
        append(k, v)
    assert torch.equal(k, before)
    q = made(B, 1, HEADS, D)
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=3)
    torch.testing.assert_close(
        found, flash_attn_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=3)
    )


def test_caches_that_overlap_are_refused_in_graphs() -> None:
    with FakeTensorMode():
        memory = torch.empty(B + 1, CAPACITY, HEADS, D, dtype=torch.float64)
        with pytest.raises(LayoutError, match=_WORDS):
            append(memory[:B], memory[1:])
    memory = made(B, CAPACITY, HEADS, D)
    with pytest.raises(LayoutError, match=f"{_WORDS} one tensor"):
        torch.compile(append, backend="eager")(memory, memory)


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        ((2, B, CAPACITY, HEADS, D), lambda x: x.unbind(0)),
        ((B, 2, CAPACITY, HEADS, D), lambda x: x.unbind(1)),
        ((B, CAPACITY, 2, HEADS, D), lambda x: x.unbind(2)),
        ((B, CAPACITY, HEADS, 2 * D), lambda x: x.split(D, -1)),
    ],
    ids=["one behind the other", "by sequence", "by key", "by head"],
)
def test_parts_of_one_tensor_are_written(shape: tuple[int, ...], split: Any) -> None:
    k, v = split(made(*shape))
    alone = k.clone(), v.clone()
    assert torch.equal(append(k, v), append(*alone))
    assert torch.equal(k, alone[0])
    assert torch.equal(v, alone[1])


def test_pages_of_one_tensor_for_keys_and_values() -> None:
    """As in transformers' continuous batching: views of all pages, one page apart."""
    memory = made(9, 4, HEADS, D)
    table = torch.tensor([[0, 4], [2, 6]], dtype=torch.int32)
    q, k, v = (made(B, 1, HEADS, D) for _ in "qkv")

    def call(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Any:
        options = {"cache_seqlens": ints(3, 5), "block_table": table}
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)

    alone = memory[:-1].clone(), memory[1:].clone()
    assert torch.equal(call(memory[:-1], memory[1:]), call(*alone))
    assert torch.equal(memory[:-1:2], alone[0][::2])
    assert torch.equal(memory[1::2], alone[1][::2])
    rows = memory.flatten(0, 1)
    with pytest.raises(LayoutError, match=_WORDS):
        call(rows[:-4].view_as(alone[0]), rows[2:-2].view_as(alone[0]))


@pytest.mark.parametrize(
    ("table", "lengths", "pads", "fits"),
    [
        (((0, 1), (2, 3)), (3, 6), (0, 0), True),
        (((0, 1), (0, 3)), (5, 4), (0, 0), True),  # only the first page is shared, and is full
        (((0, 1), (2, 1)), (5, 2), (0, 0), True),  # the second one does not come to page 1
        (((1, 0), (2, 0)), (5, 3), (0, 4), False),  # both write to page 0
        (((0, 1), (2, 0)), (0, 6), (0, 0), False),  # the first one writes where the second reads
        (((0, 1), (2, 0)), (0, 6), (0, 6), True),  # but not where it has padding
        (((0, 0), (2, 3)), (3, 1), (0, 0), False),  # it overwrites its own key
    ],
    ids=str,
)
def test_new_keys_have_pages_of_their_own(
    table: tuple[tuple[int, int], ...], lengths: Any, pads: Any, fits: bool
) -> None:
    k_cache, v_cache = made(5, 4, HEADS, D), made(5, 4, HEADS, D)
    q, k, v = made(B, 2, HEADS, D), made(B, 2, HEADS, D), made(B, 2, HEADS, D)
    before = k_cache.clone()

    def call() -> Any:
        return flash_attn_with_kvcache(
            *(q, k_cache, v_cache, k, v),
            cache_seqlens=ints(*lengths),
            cache_leftpad=ints(*pads),
            block_table=torch.tensor(table, dtype=torch.int32),
        )

    if fits:
        call()
        changed = (k_cache != before).flatten(2).any(-1)
        assert int(changed.sum()) == B * 2
        return
    with pytest.raises(InvalidInputError, match=r"row of new keys once, found .* \[0\] twice"):
        call()
    assert torch.equal(k_cache, before)
