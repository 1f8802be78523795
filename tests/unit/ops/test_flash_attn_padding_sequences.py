"""KV caches with padding sequences in a batch, of which no key is read and nothing is written.

Continuous batching fills batches up to the sizes of CUDA graphs. Those sequences have a negative
length, slot or page.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from flashvar.errors import ShapeError
from flashvar.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

M, HEADS, HEADS_K, D, PAGE, CAPACITY = 3, 4, 2, 16, 4, 12


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


_NO_PAGES = (-1, -1, -1)

# The options, and which sequences are real.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "length": ({"cache_seqlens": ints(5, -1, 0)}, (0, 2)),
    "lengths of 64 bits": ({"cache_seqlens": torch.tensor([-(2**40), 7, -1])}, (1,)),
    "length, left pad": ({"cache_seqlens": ints(5, -1, 4), "cache_leftpad": ints(2, 3, 0)}, (0, 2)),
    "slot": ({"cache_seqlens": ints(5, 3, 0), "cache_batch_idx": ints(4, -1, 2)}, (0, 2)),
    "slots": ({"cache_seqlens": ints(5, 3, 7), "cache_batch_idx": ints(-1, 0, -7)}, (1,)),
    # The real one writes the row 0 of the same slot.
    "slot of another": (
        {"cache_seqlens": ints(-1, 0, -1), "cache_batch_idx": ints(2, 2, 2)},
        (1,),
    ),
    "pages": (
        {"cache_seqlens": ints(5, -1, 2), "block_table": pages((3, 1, -1), _NO_PAGES, (0, 2, -1))},
        (0, 2),
    ),
    "pages of another": (
        {"cache_seqlens": ints(0, -1, -1), "block_table": pages((0, 1, 2), (0, 1, 2), (0, 0, 0))},
        (0,),
    ),
    "pages alone": (
        {"cache_seqlens": ints(5, 6, 1), "block_table": pages((3, 1, -1), (0, 4, -1), _NO_PAGES)},
        (0, 1),
    ),
    "pages, left pad": (
        {
            "cache_seqlens": ints(6, -1, 5),
            "cache_leftpad": ints(4, 5, 1),
            "block_table": pages((-1, 1, 4), (2, 2, 2), _NO_PAGES),
        },
        (0,),
    ),
    "all": ({"cache_seqlens": ints(-1, -2, -1)}, ()),
    "all without slots": (
        {"cache_seqlens": ints(1, 2, 3), "cache_batch_idx": ints(-1, -1, -1)},
        (),
    ),
    "all without pages": (
        {"cache_seqlens": ints(-1, 3, -1), "block_table": pages(_NO_PAGES, _NO_PAGES, _NO_PAGES)},
        (),
    ),
    "none": ({"cache_seqlens": ints(5, 3, 0)}, (0, 1, 2)),
}


def arguments(
    options: dict[str, Any], new: int, rotary: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    """The caches, and the other arguments."""
    slots, rows = (5, PAGE) if "block_table" in options else (5, CAPACITY)
    given: dict[str, Any] = {"q": made(3, M, HEADS, D), **options, "causal": True}
    if new:
        given |= {name: made(3, new, HEADS_K, D) for name in "kv"}
    if rotary:
        angles = torch.rand(CAPACITY + M, D // 2, dtype=torch.float64)
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return (made(slots, rows, HEADS_K, D), made(slots, rows, HEADS_K, D)), given


def attend(caches: Any, given: dict[str, Any]) -> Any:
    return flash_attn_with_kvcache(
        k_cache=caches[0], v_cache=caches[1], **given, return_softmax_lse=True
    )


def alone(given: dict[str, Any], real: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of a call with the real sequences alone."""
    at = list(real)
    kept = {
        name: x[at] if isinstance(x, torch.Tensor) and not name.startswith("rotary") else x
        for name, x in given.items()
    }
    if "block_table" not in given and "cache_batch_idx" not in given:
        kept["cache_batch_idx"] = ints(*real)
    return kept


@lru_cache(maxsize=1)
def graph(way: str, names: tuple[str, ...], new: int, rotary: bool) -> Any:
    """One for all cases with the same arguments, which follow one another."""
    del names, new, rotary
    torch._dynamo.reset()
    return torch.compile(attend, fullgraph=True, backend=way)


@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: [*CASES[case][0]]))
@pytest.mark.parametrize(("new", "rotary"), [(0, False), (1, False), (2, False), (2, True)])
@pytest.mark.parametrize("way", ["called", "eager", "aot_eager"])
def test_padding_sequences(case: str, new: int, rotary: bool, way: str) -> None:
    options, real = CASES[case]
    caches, given = arguments(options, new, rotary)
    others = caches[0].clone(), caches[1].clone()
    wanted, of_sums = attend(others, alone(given, real))
    call = attend if way == "called" else graph(way, (*options,), new, rotary)
    out, lse = call(caches, given)
    torch.testing.assert_close(out[list(real)], wanted)
    torch.testing.assert_close(lse[list(real)], of_sums)
    for sequence in {0, 1, 2} - set(real):
        assert not out[sequence].any()
        assert (lse[sequence] == -torch.inf).all()
    torch.testing.assert_close(caches, others)


@pytest.mark.parametrize("new", [0, 1])
def test_one_graph_for_all_batches(new: int) -> None:
    """Which sequences are real depends on values: a graph is not traced for some of them."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for options, real in (CASES[name] for name in ("none", "length", "all")):
            caches, given = arguments(options, new, False)
            others = caches[0].clone(), caches[1].clone()
            wanted = attend(others, alone(given, real))
            out, lse = compiled(caches, given)
            torch.testing.assert_close((out[list(real)], lse[list(real)]), wanted)
            torch.testing.assert_close(caches, others)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_seqlens": ints(5, -1, 12)}, "k_cache holds at most 12 keys .* found 13"),
        (
            {"cache_seqlens": ints(5, -1, 3), "cache_batch_idx": ints(0, 5, 5)},
            r"cache_batch_idx must be from 0 to 4, found \[5\]",
        ),
        (
            {"cache_seqlens": ints(5, 1, 3), "cache_leftpad": ints(0, 5, 0)},
            r"must not be below cache_leftpad, \[0, 5, 0\], found \[5, 1, 3\]",
        ),
        (
            {
                "cache_seqlens": ints(7, 0, 3),
                "block_table": pages((2, -1, -1), (0, 1, 3), _NO_PAGES),
            },
            r"block_table must be from 0 to 4, found \[-1\]",
        ),
        (
            {
                "cache_seqlens": ints(1, -1, 3),
                "block_table": pages((2, -1, -1), (7, 7, 7), (5, 0, 0)),
            },
            r"block_table must be from 0 to 4, found \[5\]",
        ),
    ],
    ids=["too long", "slot", "left pad", "one page is absent", "page"],
)
def test_mistakes_stay_errors(options: dict[str, Any], words: str) -> None:
    caches, given = arguments(options, 1, False)
    before = caches[0].clone(), caches[1].clone()
    with pytest.raises(ShapeError, match=words):
        attend(caches, given)
    assert torch.equal(caches[0], before[0])
    assert torch.equal(caches[1], before[1])


@pytest.mark.parametrize("way", ["called", "aot_eager"])
def test_new_keys_that_are_views_of_the_caches(way: str) -> None:
    """What is written does not change what is still to be written."""
    caches, given = arguments({"cache_seqlens": ints(5, 3, 0)}, 2, False)
    others = caches[0].clone(), caches[1].clone()
    k, v = caches[1][:3, 2:4], caches[0][:3, 4:6]
    wanted = attend(others, {**given, "k": k.clone(), "v": v.clone()})

    def call(caches: Any, given: dict[str, Any]) -> Any:
        return attend(caches, {**given, "k": caches[1][:3, 2:4], "v": caches[0][:3, 4:6]})

    torch._dynamo.reset()
    found = call if way == "called" else torch.compile(call, fullgraph=True, backend=way)
    torch.testing.assert_close(found(caches, given), wanted)
    torch.testing.assert_close(caches, others)


def attend_packed(q: Any, k: Any, v: Any, table: torch.Tensor) -> Any:
    ends, after = ints(0, 2, 3, 6), ints(0, 5, 7, 13)
    return flash_attn_varlen_func(
        q, k, v, ends, after, 3, 8, return_attn_probs=True, block_table=table
    )[:2]


@pytest.mark.parametrize("way", ["called", "eager", "aot_eager"])
@pytest.mark.parametrize("second", [(-1, 3, 0), (-7, 99, -1)], ids=["page", "pages"])
def test_packed_queries_of_padding_sequences(second: tuple[int, ...], way: str) -> None:
    """An index of -1 would be the last page: keys of another sequence."""
    q = made(6, HEADS, D).requires_grad_()
    k, v = (made(5, PAGE, HEADS_K, D).requires_grad_() for _ in "kv")
    call = attend_packed
    if way != "called":
        torch._dynamo.reset()
        call = torch.compile(attend_packed, fullgraph=True, backend=way)
    out, lse = call(q, k, v, pages((3, 4, -1), second, (0, 2, -1)))
    expected, of_sums = attend_packed(q, k, v, pages((3, 4, -1), (1, 1, 1), (0, 2, -1)))
    real = [0, 1, 3, 4, 5]
    torch.testing.assert_close((out[real], lse[:, real]), (expected[real], of_sums[:, real]))
    assert not out[2].any()
    assert (lse[:, 2] == -torch.inf).all()
    grads = [torch.autograd.grad(x[real].square().sum(), (q, k, v)) for x in (out, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_packed_queries_without_one_of_their_pages(way: str) -> None:
    """Where the host does not read the table: on the CPU this is an error."""
    q, k, v = made(6, HEADS, D), made(5, PAGE, HEADS_K, D), made(5, PAGE, HEADS_K, D)
    table = pages((3, 4, -1), (1, -1, -1), (0, -1, -1))
    with pytest.raises(ShapeError, match=r"block_table must be from 0 to 4, found \[-1\]"):
        attend_packed(q, k, v, table)
    torch._dynamo.reset()
    out, lse = torch.compile(attend_packed, fullgraph=True, backend=way)(q, k, v, table)
    expected, of_sums = attend_packed(q, k, v, pages((3, 4, -1), (1, 0, 0), _NO_PAGES))
    torch.testing.assert_close((out, lse), (expected, of_sums))
    assert not out[3:].any()
