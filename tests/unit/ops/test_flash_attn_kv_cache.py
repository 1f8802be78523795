"""`flash_attn_with_kvcache` and paged `flash_attn_varlen_func`, beside loops over sequences."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from flashvar import flash_attn
from flashvar.compat.flash_attn import flash_attn_interface as interface
from flashvar.compat.flash_attn.layers.rotary import apply_rotary_emb
from flashvar.errors import (
    BackendUnavailableError,
    DtypeError,
    InvalidInputError,
    LayoutError,
    ShapeError,
)
from flashvar.ops.sequences import as_int32

B, M, HEADS, HEADS_K, D = 3, 4, 4, 2, 16
PAGE, CAPACITY = 8, 24
SEEN = (5, 0, 17)
TABLE = torch.tensor([[7, 2, 99], [4, -1, 3], [0, 8, 5]], dtype=torch.int32)
LAYOUTS = ("in order", "slots", "pages", "left pad")


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Caches:
    """Keys and values in one of the layouts, NaN where nothing may be read."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        slots, capacity = (9, PAGE) if layout == "pages" else (5, CAPACITY)
        self.k, self.v = (made(slots, capacity, HEADS_K, D) for _ in "kv")
        self.options: dict[str, Any] = {"cache_seqlens": ints(*SEEN)}
        if layout == "slots":
            self.options["cache_batch_idx"] = ints(4, 0, 2)
        if layout == "pages":
            self.options["block_table"] = TABLE
        if layout == "left pad":
            self.options["cache_leftpad"] = ints(2, 0, 16)

    def of(self, cache: torch.Tensor, sequence: int, end: int) -> torch.Tensor:
        """The keys or values of a sequence up to a position, copied."""
        if self.layout == "pages":
            pages = TABLE[sequence, : -(-end // PAGE)].long()
            return cache[pages].flatten(0, 1)[:end].clone()
        if self.layout == "slots":
            sequence = [4, 0, 2][sequence]
        begin = [2, 0, 16][sequence] if self.layout == "left pad" else 0
        return cache[sequence, begin:end].clone()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"window_size": (3, 1), "softcap": 2.0},
    "alibi": {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.4, HEADS)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_is_read(layout: str, options: dict[str, Any]) -> None:
    caches, q = Caches(layout), made(B, M, HEADS, D)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, caches.k, caches.v, **caches.options, **options, return_softmax_lse=True, num_splits=3
    )
    for i, end in enumerate(SEEN):
        k, v = (caches.of(cache, i, end)[None] for cache in (caches.k, caches.v))
        if not k.shape[1]:
            assert not out[i].any()
            assert (lse[i] == -torch.inf).all()
            continue
        wanted, of_sums, _ = flash_attn.flash_attn_func(
            q[i : i + 1], k, v, **options, return_attn_probs=True
        )
        torch.testing.assert_close(out[i : i + 1], wanted)
        torch.testing.assert_close(lse[i : i + 1], of_sums)


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_keys_are_written(layout: str, options: dict[str, Any], rotary: str | None) -> None:
    caches, q = Caches(layout), made(B, M, HEADS, D)
    new, of_values = made(B, 3, HEADS_K, D), made(B, 3, HEADS_K, D)
    before = caches.k.clone()
    tables: dict[str, Any] = {}
    rotated_q, rotated = q, new
    if rotary is not None:
        angles = torch.rand(40, 6, dtype=torch.float64)
        cos, sin = angles.cos(), angles.sin()
        interleaved = rotary == "interleaved"
        tables = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        position = {"interleaved": interleaved, "seqlen_offsets": ints(*SEEN)}
        rotated = apply_rotary_emb(new, cos, sin, **position)
        rows = [q] if options else q.split(1, 1)  # all queries at one position
        rotated_q = torch.cat([apply_rotary_emb(one, cos, sin, **position) for one in rows], 1)
    if layout == "pages":
        tables["block_table"] = torch.where(TABLE < 0, 6, TABLE)
    out = flash_attn.flash_attn_with_kvcache(
        q, caches.k, caches.v, new, of_values, **{**caches.options, **tables}, **options
    )
    changed = (caches.k != before).flatten(2).any(-1)
    assert int(changed.sum()) == B * 3
    for i, end in enumerate(SEEN):
        k, v = (caches.of(cache, i, end + 3)[None] for cache in (caches.k, caches.v))
        torch.testing.assert_close(k[0, -3:], rotated[i])
        assert torch.equal(v[0, -3:], of_values[i])
        wanted = flash_attn.flash_attn_func(rotated_q[i : i + 1], k, v, **options)
        torch.testing.assert_close(out[i : i + 1], wanted)


def test_a_window_that_hides_no_key_is_none() -> None:
    """As in FlashAttention, which then rotates all queries for one position."""
    caches, q, new = Caches("in order"), made(B, M, HEADS, D), made(B, 3, HEADS_K, D)
    angles = torch.rand(40, 6, dtype=torch.float64)

    def call(*window: int) -> torch.Tensor:
        tensors = (q, caches.k.clone(), caches.v.clone(), new, new, angles.cos(), angles.sin())
        out: torch.Tensor
        out = flash_attn.flash_attn_with_kvcache(*tensors, **caches.options, window_size=window)
        return out

    torch.testing.assert_close(call(CAPACITY, CAPACITY), call(-1, -1))
    assert not torch.allclose(call(CAPACITY, CAPACITY - 1), call(-1, -1))


def test_a_number_of_keys_and_all_of_them() -> None:
    q, k, v = made(2, 1, HEADS, D), made(3, 9, HEADS_K, D), made(3, 9, HEADS_K, D)
    for count, kept in ((None, 9), (4, 4)):
        out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=count)
        wanted = flash_attn.flash_attn_func(q, k[:2, :kept], v[:2, :kept])
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("pages", [False, True])
def test_compiles_without_a_break(pages: bool) -> None:
    q, new = made(2, 1, HEADS, D), made(2, 1, HEADS_K, D)
    table = ints(1, 0)[:, None] if pages else None

    def call(k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attn.flash_attn_with_kvcache(
            q, k, v, new, new, cache_seqlens=ints(3, 8), block_table=table, causal=True
        )

    caches = [made(2, 9, HEADS_K, D) for _ in "kv"]
    others = [one.clone() for one in caches]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*others), call(*caches))
    assert all(map(torch.equal, caches, others))


def test_gradients_are_refused_where_they_are_asked_for() -> None:
    q, k = made(2, 1, HEADS, D).requires_grad_(), made(2, 9, HEADS_K, D)
    out = flash_attn.flash_attn_with_kvcache(q, k, k)
    with pytest.raises(BackendUnavailableError, match="flash_attn_with_kvcache has no derivatives"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_refused_by_a_compiled_call(backend: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(flash_attn.flash_attn_with_kvcache, backend=backend, fullgraph=True)
    q, k = made(2, 1, HEADS, D).requires_grad_(), made(2, 9, HEADS_K, D)
    out, lse = call(q, k, k, return_softmax_lse=True)
    torch.testing.assert_close(
        (out, lse), flash_attn.flash_attn_with_kvcache(q, k, k, return_softmax_lse=True)
    )
    for one in (out, lse):
        with pytest.raises(BackendUnavailableError, match="kvcache has no derivatives"):
            torch.autograd.grad(one.sum() + q.sum(), q, retain_graph=True)


@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin", "alibi_slopes"])
def test_gradients_of_other_tensors_are_refused(name: str) -> None:
    q, k, new = made(2, 1, HEADS, D), made(2, 9, HEADS_K, D), made(2, 1, HEADS_K, D)
    given = {"rotary_cos": made(9, 4), "rotary_sin": made(9, 4), "alibi_slopes": torch.ones(HEADS)}
    leaf = given[name].requires_grad_()
    out = flash_attn.flash_attn_with_kvcache(q, k, k.clone(), new, new, cache_seqlens=3, **given)
    with pytest.raises(BackendUnavailableError, match="kvcache has no derivatives"):
        torch.autograd.grad(out.sum(), leaf)


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_without_values(layout: str, kind: str) -> None:
    caches, q, new = Caches(layout), made(B, M, HEADS, D), made(B, M, HEADS_K, D)
    given: Any = [q, caches.k, caches.v, new, new, caches.options]
    mode = FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else nullcontext()
    make = mode.from_tensor if isinstance(mode, FakeTensorMode) else lambda x: x.to("meta")
    *tensors, options = tree_map(make, given)
    with mode:
        out = flash_attn.flash_attn_with_kvcache(*tensors, **options)
    assert out.shape == q.shape


@pytest.mark.parametrize(("batch", "rows"), [(0, M), (B, 0)], ids=["no sequence", "no query"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_to_do(layout: str, batch: int, rows: int) -> None:
    caches, q = Caches(layout), made(batch, rows, HEADS, D)
    options = {name: one[:batch] for name, one in caches.options.items()}
    tables = {"rotary_cos": made(CAPACITY, 4), "rotary_sin": made(CAPACITY, 4)}
    new = made(batch, 1, HEADS_K, D)
    out = flash_attn.flash_attn_with_kvcache(q, caches.k, caches.v, new, new, **options, **tables)
    assert out.shape == q.shape


def test_what_is_refused() -> None:
    q, k, new = made(2, 1, HEADS, D), made(2, 9, HEADS_K, D), made(2, 1, HEADS_K, D)
    call = flash_attn.flash_attn_with_kvcache
    table = ints(0, 1)[:, None]
    with pytest.raises(InvalidInputError, match="k and v must come together"):
        call(q, k, k, new, cache_seqlens=1)
    with pytest.raises(InvalidInputError, match="k must come with cache_seqlens"):
        call(q, k, k, new, new)
    for number in (-1, 2.5, True):
        with pytest.raises(InvalidInputError, match="cache_seqlens must be a whole number, not"):
            call(q, k, k.clone(), new, new, cache_seqlens=number)
    with pytest.raises(ShapeError, match="k and v must have the same number of rows"):
        call(q, k, k.clone(), torch.cat((new, new), 1), new, cache_seqlens=1)
    pages, longer = made(3, PAGE, HEADS_K, D), made(3, 2 * PAGE, HEADS_K, D)
    with pytest.raises(ShapeError, match="k and v must have the same shape except for"):
        flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), pages, longer, ints(0, 1, 2), ints(0, 5, 9), 1, 5, block_table=table
        )
    with pytest.raises(InvalidInputError, match=r"must name each slot once .* found \[1, 1\]"):
        call(q, k, k.clone(), new, new, cache_seqlens=4, cache_batch_idx=ints(1, 1))
    with pytest.raises(InvalidInputError, match="rotary_cos must come with k and v"):
        call(q, k, k, rotary_cos=k, rotary_sin=k)
    with pytest.raises(InvalidInputError, match="without cache_batch_idx"):
        call(q, k, k, block_table=table, cache_batch_idx=ints(0, 1))
    with pytest.raises(DtypeError, match=r"k_cache must be .* in the dtype of q"):
        call(q, k.float(), k)
    with pytest.raises(ShapeError, match="cache_leftpad must have 1 dimensions"):
        call(q, k, k, cache_leftpad=ints(0))
    with pytest.raises(ShapeError, match="a slot for each of 2 sequences, found 1"):
        call(q, k[:1], k[:1])
    with pytest.raises(ShapeError, match="k must have 2 sequences of the heads"):
        call(q, k, k, made(2, 1, 1, D), new, cache_seqlens=1)
    with pytest.raises(LayoutError, match="k_cache must have memory of its own"):
        call(q, k[:1].expand(2, -1, -1, -1), k, new, new, cache_seqlens=1)
    strided, first = made(2, 9, D, HEADS_K).transpose(2, 3), k.clone()
    with pytest.raises(LayoutError, match="v_cache must be contiguous in its last dimension"):
        call(q, first, strided, new, new, cache_seqlens=1)
    assert torch.equal(first, k)
    with pytest.raises(ShapeError, match=r"k_cache holds at most 9 keys .* found 10"):
        call(q, k, k.clone(), new, new, cache_seqlens=ints(3, 9))
    with pytest.raises(ShapeError, match="block_table addresses at most 9 keys"):
        call(q, k, k, cache_seqlens=ints(3, 10), block_table=table)
    with pytest.raises(ShapeError, match="below cache_leftpad"):
        call(q, k, k, cache_seqlens=ints(3, 9), cache_leftpad=ints(4, 0))
    with pytest.raises(ShapeError, match=r"cache_batch_idx must be from 0 to 1, found \[2\]"):
        call(q, k, k, cache_batch_idx=ints(0, 2))
    with pytest.raises(ShapeError, match="block_table must be from 0 to 1"):
        call(q, k, k, cache_seqlens=4, block_table=ints(0, 2)[:, None])


QUERIES = (2, 0, 5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_queries_beside_pages(options: dict[str, Any]) -> None:
    caches, q = Caches("pages"), made(sum(QUERIES), HEADS, D).requires_grad_()
    caches.k.requires_grad_()
    ends = [ints(0, *sizes).cumsum(0, dtype=torch.int32) for sizes in (QUERIES, SEEN)]
    out = flash_attn.flash_attn_varlen_func(
        q, caches.k, caches.v, *ends, max(QUERIES), max(SEEN), **options, block_table=TABLE
    )
    parts = []
    for i, (one, end) in enumerate(zip(q.split(QUERIES), SEEN, strict=True)):
        k, v = (caches.of(cache, i, end)[None] for cache in (caches.k, caches.v))
        parts.append(flash_attn.flash_attn_func(one[None], k, v, **options)[0])
    torch.testing.assert_close(out, torch.cat(parts))
    wanted = torch.cat(parts)
    grads = [torch.autograd.grad(x.square().sum(), (q, caches.k)) for x in (out, wanted)]
    torch.testing.assert_close(*grads)
    with pytest.raises(ShapeError, match="room for 8: add columns"):
        flash_attn.flash_attn_varlen_func(
            q, caches.k, caches.v, *ends, 5, 17, block_table=TABLE[:, :1]
        )


@pytest.mark.parametrize("page", [-1, 9], ids=["before", "behind"])
def test_packed_queries_beside_pages_that_do_not_exist(page: int) -> None:
    """Indices below 0 would count from the end: keys of other sequences, without an error."""
    caches, q = Caches("pages"), made(sum(QUERIES), HEADS, D)
    ends = [ints(0, *sizes).cumsum(0, dtype=torch.int32) for sizes in (QUERIES, SEEN)]
    table = TABLE.clone()
    table[2, 1] = page
    with pytest.raises(ShapeError, match=rf"block_table must be from 0 to 8, found \[{page}\]"):
        flash_attn.flash_attn_varlen_func(
            q, caches.k, caches.v, *ends, max(QUERIES), max(SEEN), block_table=table
        )


@pytest.mark.parametrize("longest", [-1, None, "x", 17.0, True], ids=str)
def test_packed_queries_beside_pages_with_a_length_that_is_none(longest: Any) -> None:
    caches, q = Caches("pages"), made(sum(QUERIES), HEADS, D)
    ends = [ints(0, *sizes).cumsum(0, dtype=torch.int32) for sizes in (QUERIES, SEEN)]
    with pytest.raises(InvalidInputError, match="max_seqlen_k must be a whole number"):
        flash_attn.flash_attn_varlen_func(
            q, caches.k, caches.v, *ends, 5, longest, block_table=TABLE
        )


@pytest.mark.parametrize("new", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "of a gradient"])
def test_mapped_caches_are_refused_in_words(inside: bool, new: bool) -> None:
    q, k = made(3, 2, 1, 2, 8), made(3, 2, 4, 2, 8)

    def call(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        options = {"k": k[:, :1], "v": k[:, :1]} if new else {}
        found: torch.Tensor = flash_attn.flash_attn_with_kvcache(
            q, k, k, cache_seqlens=2, **options
        )
        return found.sum()

    mapped = torch.vmap(torch.func.grad(call) if inside else call)
    with pytest.raises(InvalidInputError, match=r"in the batch, found torch.vmap over q"):
        mapped(q, k)


@pytest.mark.parametrize("longest", [0, max(SEEN) - 1])
def test_packed_queries_beside_pages_and_a_bound_below_a_length(longest: int) -> None:
    caches, q = Caches("pages"), made(sum(QUERIES), HEADS, D)
    ends = [ints(0, *sizes).cumsum(0, dtype=torch.int32) for sizes in (QUERIES, SEEN)]
    words = f"max_seqlen_k must be at least the longest sequence, found {longest} and a sequence"
    with pytest.raises(ShapeError, match=words):
        flash_attn.flash_attn_varlen_func(
            q, caches.k, caches.v, *ends, 5, longest, block_table=TABLE
        )


@pytest.mark.parametrize(
    ("pads", "used", "words"),
    [
        ((0, 0), (6, 3), r"seqused_k must be at most .*, \[4, 5\], found \[6, 3\]"),
        ((2, 0), (6, 3), r"seqused_k must be at most"),
        ((-1, 0), (3, 3), "found 4 keys from -1 on for sequence 0"),
        ((0, 4), (3, 3), "found -1 keys from 8 on for sequence 1"),
    ],
    ids=[
        "used too many",
        "used too many behind padding",
        "negative padding",
        "padding behind the end",
    ],
)
def test_keys_of_other_sequences_are_refused(
    pads: tuple[int, int], used: tuple[int, int], words: str
) -> None:
    q, k = made(2, HEADS, D), made(9, HEADS_K, D)
    with pytest.raises(ShapeError, match=words):
        interface._flash_attn_varlen_forward(
            *(q, k, k, ints(0, 1, 2), ints(0, 4, 9), 1, 5, 0.0, None, True),
            leftpad_k=ints(*pads),
            seqused_k=ints(*used),
        )


def test_unused_keys_of_packed_sequences() -> None:
    """Those before the first, and those behind the last that is used."""
    sizes, pads, used = (4, 6, 5), (1, 0, 3), (3, 6, 4)
    q, k, v = made(7, HEADS, D), made(15, HEADS_K, D), made(15, HEADS_K, D)
    ends = [ints(0, *one).cumsum(0, dtype=torch.int32) for one in (QUERIES, sizes)]
    found = interface._flash_attn_varlen_forward(
        *(q, k, v, *ends, 5, 6, 0.0, None, True),
        leftpad_k=ints(*pads),
        seqused_k=ints(*used),
    )
    parts = [
        flash_attn.flash_attn_func(one[None], x[None, a:b], y[None, a:b], causal=True)[0]
        for one, x, y, a, b in zip(
            q.split(QUERIES), k.split(sizes), v.split(sizes), pads, used, strict=True
        )
    ]
    torch.testing.assert_close(found[0], torch.cat(parts))
    with pytest.raises(BackendUnavailableError, match="num_splits > 1 is not supported"):
        interface._flash_attn_varlen_forward(q, k, v, *ends, 5, 6, 0.0, None, True, num_splits=2)


@pytest.mark.parametrize("kind", ["column", "expanded"])
def test_lengths_of_any_strides(kind: str) -> None:
    q, k, v = made(2, 1, 4, 16), made(2, 8, 2, 16), made(2, 8, 2, 16)
    lengths = ints(5, 5)
    strided = torch.stack((lengths, lengths), 1)[:, 0] if kind == "column" else ints(5).expand(2)
    found = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=strided)
    assert torch.equal(found, flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths))


def test_long_lengths_do_not_wrap() -> None:
    """Where they cannot be read before the call, kernels limit them to the cache."""
    lengths = torch.tensor([7, 2**31 + 5, -(2**33), 2**62])
    assert as_int32(lengths).tolist() == [7, 2**31 - 1, -(2**31), 2**31 - 1]
    assert as_int32(lengths[:1].short()).dtype == torch.int32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softmax_scale": ([2],)}, "scale must be a number"),
        ({"softcap": ([2],)}, "softcap must be a finite number"),
        ({"window_size": (([2],), 0)}, "window_size must be two integers"),
    ],
    ids=["scale", "softcap", "window"],
)
def test_options_without_a_hash_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    q, k = made(2, 1, HEADS, D), made(2, 9, HEADS_K, D)
    with pytest.raises(InvalidInputError, match=words):
        flash_attn.flash_attn_with_kvcache(q, k, k, **options)


def test_padding_sequences_are_not_rotated() -> None:
    q, new = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    tables = {"rotary_cos": torch.randn(9, 4), "rotary_sin": torch.randn(9, 4)}
    caches = torch.randn(2, 2, 9, 2, 8)
    others = caches.clone()
    call = flash_attn.flash_attn_with_kvcache
    found = call(q, *caches, new, new, cache_seqlens=ints(-1, 3), causal=True, **tables)
    one = slice(1, 2)
    wanted = call(q[one], *others[:, one], new[one], new[one], cache_seqlens=3, **tables)
    assert torch.equal(found[one], wanted)
    assert not found[0].any()
    assert torch.equal(caches, others)
