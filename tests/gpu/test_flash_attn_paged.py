"""`flash_attn_with_kvcache` on caches that are read in place, beside a cache in order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from device_call import DEVICE
from graphs_and_streams import captured

from flashvar.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flashvar.ops.attention import paged

pytestmark = pytest.mark.usefixtures("seed")

WAYS = ("called", "graph", "compiled")


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Call:
    """A random call with pages or slots, and what it must give."""

    def __init__(self, kind: str, draw: random.Random) -> None:
        self.batch, self.heads_k = draw.randint(1, 5), draw.choice([1, 2, 3, 8])
        self.heads = self.heads_k * draw.choice([1, 2, 3, 4, 8])
        self.dim, self.dim_v = draw.choice([(64, 64), (128, 128), (80, 48), (192, 128), (256, 256)])
        self.page = draw.choice([1, 7, 16, 64, 256])
        self.pages = max(2, draw.choice([100, 700, 3000]) // self.page)
        self.queries = draw.choice([1, 1, 2, 5, 16])
        self.new = draw.choice([0, 0, self.queries])
        self.dtype = draw.choice([torch.bfloat16, torch.float16])
        self.capacity = self.page * self.pages
        self.before = [draw.randint(0, self.capacity - self.new) for _ in range(self.batch)]
        self.options: dict[str, Any] = {"causal": draw.random() < 0.6}
        if draw.random() < 0.3:
            self.options["window_size"] = (draw.randint(0, 200), draw.choice([-1, 0, 9]))
        if draw.random() < 0.3:
            self.options["softcap"] = 3.0
        if draw.random() < 0.3:
            self.options["alibi_slopes"] = torch.rand(self.heads, device=DEVICE)
        rows, total = self.page, self.batch * self.pages + 1
        self.places: dict[str, torch.Tensor] = {}
        if kind == "pages":
            table = torch.randperm(total, device=DEVICE)[: total - 1].view(self.batch, -1)
            self.places["block_table"] = table.int()
        else:
            rows, total = self.capacity, self.batch + 1
            self.places["cache_batch_idx"] = torch.randperm(total, device=DEVICE)[:-1].int()
        if draw.random() < 0.3:
            begins = [draw.randint(0, n) for n in self.before]
            self.places["cache_leftpad"] = ints(begins)
        self.caches = [
            self.normal(total, rows, self.heads_k, dim) for dim in (self.dim, self.dim_v)
        ]
        self.q = self.normal(self.batch, self.queries, self.heads, self.dim)
        self.k = self.v = None
        if self.new:
            self.k = self.normal(self.batch, self.new, self.heads_k, self.dim)
            self.v = self.normal(self.batch, self.new, self.heads_k, self.dim_v)

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=DEVICE, dtype=self.dtype)

    def run(self) -> Any:
        return flash_attn_with_kvcache(
            *(self.q, *self.caches, self.k, self.v),
            cache_seqlens=ints(self.before),
            **self.places,
            **self.options,
            return_softmax_lse=True,
        )

    def expected(self, sequence: int) -> Any:
        """Of one sequence, whose keys, the new ones with them, are made a cache in order."""
        one = slice(sequence, sequence + 1)
        begin = 0
        if "cache_leftpad" in self.places:
            begin = int(self.places["cache_leftpad"][sequence])
        keys = []
        for cache, new in zip(self.caches, (self.k, self.v), strict=True):
            if "block_table" in self.places:
                rows = cache[self.places["block_table"][sequence].long()].flatten(0, 1)
            else:
                rows = cache[int(self.places["cache_batch_idx"][sequence])]
            used = [rows[begin : self.before[sequence]]]
            keys.append(torch.cat(used + ([] if new is None else [new[sequence]]))[None])
        if not keys[0].shape[1]:
            return None
        return flash_attn_with_kvcache(self.q[one], *keys, **self.options, return_softmax_lse=True)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the choice of a launch gave, call by call."""
    found: list[Any] = []
    choose = paged.launch_of

    def chosen(*given: Any) -> Any:
        found.append(choose(*given))
        return found[-1]

    for module in ("flashvar.ops.attention.paged", "flashvar.ops.attention.kv_cache"):
        monkeypatch.setattr(f"{module}.launch_of", chosen)
    return found


@pytest.mark.parametrize("number", range(60))
@pytest.mark.parametrize("kind", ["pages", "slots"])
def test_random_calls(kind: str, number: int, launches: list[Any]) -> None:
    call = Call(kind, random.Random(f"{kind} {number}"))
    wanted = [call.expected(sequence) for sequence in range(call.batch)]
    out, lse = call.run()
    assert launches
    assert all(launch is not None for launch in launches)
    for sequence, one in enumerate(wanted):
        if one is None:
            assert not out[sequence].any()
            assert (lse[sequence] == -torch.inf).all()
            continue
        torch.testing.assert_close(out[sequence], one[0][0], rtol=1.6e-2, atol=8e-3)
        torch.testing.assert_close(lse[sequence], one[1][0], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("which", ["q", "caches", "all"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 4), (8, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("kind", ["pages", "slots"])
def test_rows_at_any_address(
    kind: str, before: int, after: int, which: str, launches: list[Any]
) -> None:
    """Rows that begin `before` elements after an aligned address, with NaN around them."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        room = x.new_full((*x.shape[:-1], before + x.shape[-1] + after), torch.nan)
        return room[..., before : before + x.shape[-1]].copy_(x)

    for number in range(6):
        call = Call(kind, random.Random(f"{kind} {number}"))
        wanted = call.run()
        if which != "caches":
            call.q = moved(call.q)
        if which != "q":
            call.caches = [moved(cache) for cache in call.caches]
            call.k, call.v = (None if x is None else moved(x) for x in (call.k, call.v))
        found = call.run()
        assert all(launch is not None for launch in launches)
        torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=8e-3)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("way", ["graph", "compiled"])
@pytest.mark.parametrize("kind", ["pages", "slots"])
def test_ways(kind: str, way: str, launches: list[Any]) -> None:
    """A graph and a compiled step read the lengths and the table of each run."""
    draw = random.Random(kind)
    call = Call(kind, draw)
    call.places.pop("cache_leftpad", None)
    before = ints(call.before)

    def step() -> Any:
        return flash_attn_with_kvcache(
            *(call.q, *call.caches, call.k, call.v),
            cache_seqlens=before,
            **call.places,
            **call.options,
            return_softmax_lse=True,
        )

    run, results = step, None
    if way == "graph":
        graph, results = captured(step)
        run = graph.replay
    else:
        torch._dynamo.reset()
        run = torch.compile(step, fullgraph=True)
        run()
    assert launches[-1] is not None
    call.before = [draw.randint(0, call.capacity - call.new) for _ in range(call.batch)]
    before.copy_(ints(call.before))
    for place in call.places.values():
        place.copy_(place.flip(0))
    found = run()
    out, lse = found if results is None else results
    wanted, of_sums = call.run()
    assert torch.equal(out, wanted)
    assert torch.equal(lse, of_sums)


class Packed:
    """Random packed queries on pages, as a batch of prompts and decoding sequences has."""

    def __init__(self, draw: random.Random) -> None:
        self.batch, self.heads_k = draw.randint(1, 6), draw.choice([1, 2, 8])
        self.heads = self.heads_k * draw.choice([1, 2, 3])
        self.dim = draw.choice([64, 128, 96])
        self.page = draw.choice([16, 48, 256])
        self.pages = max(2, draw.choice([200, 2000]) // self.page)
        self.longest = draw.choice([1, 1, 3, 40])
        self.options: dict[str, Any] = {"causal": draw.random() < 0.7}
        if draw.random() < 0.3:
            self.options["window_size"] = (draw.randint(0, 200), 0)
        capacity, total = self.page * self.pages, self.batch * self.pages + 1
        lengths = [draw.randint(0, self.longest) for _ in range(self.batch)]
        lengths[draw.randrange(self.batch)] = self.longest
        self.keys = [draw.randint(n, capacity) for n in lengths]
        self.ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        table = torch.randperm(total, device=DEVICE)[: total - 1].view(self.batch, -1)
        self.table = table.int()
        shape = (total, self.page, self.heads_k, self.dim)
        self.pools = torch.randn(2, *shape, device=DEVICE).bfloat16().unbind()
        self.q = torch.randn(self.ends[-1], self.heads, self.dim, device=DEVICE).bfloat16()
        self.offsets_k = ints([0, *self.keys]).cumsum(0).int()

    def run(self, q: torch.Tensor | None = None) -> Any:
        return flash_attn_varlen_func(
            *(self.q if q is None else q, *self.pools, ints(self.ends), self.offsets_k),
            *(self.longest, max(self.keys)),
            block_table=self.table,
            **self.options,
            return_attn_probs=True,
        )

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        for sequence, count in enumerate(self.keys):
            rows = slice(*self.ends[sequence : sequence + 2])
            if rows.start == rows.stop:
                continue
            pages = self.table[sequence].long()
            k, v = (x[pages].flatten(0, 1)[None, :count] for x in self.pools)
            if not count:
                assert not out[rows].any()
                continue
            wanted, of_sums, _ = flash_attn_func(
                self.q[None, rows], k, v, **self.options, return_attn_probs=True
            )
            torch.testing.assert_close(out[rows], wanted[0], rtol=1.6e-2, atol=8e-3)
            torch.testing.assert_close(lse[:, rows], of_sums[0], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("number", range(40))
def test_packed_queries(number: int, launches: list[Any]) -> None:
    call = Packed(random.Random(number))
    out, lse, _ = call.run()
    assert launches[-1] is not None
    call.check(out, lse)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("number", range(3))
def test_packed_queries_compiled(number: int, launches: list[Any]) -> None:
    call = Packed(random.Random(f"compiled {number}"))
    torch._dynamo.reset()
    out, lse, _ = torch.compile(call.run, fullgraph=True)()
    assert launches[-1] is not None
    call.check(out, lse)


def test_gradients_of_packed_queries_are_those_of_copies(launches: list[Any]) -> None:
    call = Packed(random.Random("gradient"))
    q = call.q.clone().requires_grad_()
    out, lse, _ = call.run(q)
    assert not launches
    call.check(out.detach(), lse.detach())
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_step_copies_no_cache() -> None:
    caches = torch.randn(2, 4096, 64, 8, 128, device=DEVICE, dtype=torch.bfloat16).unbind()
    q, new = (torch.randn(4, 1, heads, 128, device=DEVICE).bfloat16() for heads in (32, 8))
    table = torch.arange(4096, device=DEVICE, dtype=torch.int32).view(4, 1024)
    before = ints([100, 200, 300, 65535])

    @torch.compile(fullgraph=True)
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flash_attn_with_kvcache(
            q, k, v, new, new, cache_seqlens=before, block_table=table, causal=True
        )
        return found

    step(q, *caches)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step(q, *caches)
    assert torch.cuda.max_memory_allocated() - held < caches[0].nbytes / 4


@pytest.mark.filterwarnings("ignore")  # the profiler's own
@pytest.mark.parametrize("new", [0, 1])
def test_launches_of_a_call(new: int) -> None:
    """No key is copied, and the host waits for nothing."""
    caches = torch.randn(2, 512, 64, 2, 128, device=DEVICE, dtype=torch.bfloat16).unbind()
    q, k = (torch.randn(4, 1, heads, 128, device=DEVICE).bfloat16() for heads in (8, 2))
    table, before = torch.arange(512, device=DEVICE).int().view(4, 128), ints([5, 7, 100, 8000])
    rows = (k, k) if new else (None, None)

    def step() -> Any:
        return flash_attn_with_kvcache(q, *caches, *rows, cache_seqlens=before, block_table=table)

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.name.endswith("_kernel")]
    assert sorted(kernels) == ["append_kernel", "split_kv_kernel", "split_kv_merge_kernel"]


@pytest.mark.parametrize("missing", ["room", "page"])
def test_nan_where_keys_are_missing(missing: str) -> None:
    """On a GPU the host does not wait for lengths and tables to refuse them."""
    caches = torch.randn(2, 8, 16, 2, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    q, table = torch.randn(2, 1, 4, 64, device=DEVICE).bfloat16(), ints([[0, 1], [2, 3]])
    before = ints([32, 20])
    if missing == "room":
        before[0] = 33
    else:
        table[0, 1] = 8
    out, lse = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=before, block_table=table, return_softmax_lse=True
    )
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


def test_many_queries_take_copies(launches: list[Any]) -> None:
    caches = torch.randn(2, 64, 64, 2, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    table, before = torch.arange(64, device=DEVICE).int().view(2, 32), ints([2000, 900])
    for queries, in_place in ((1, True), (64, True), (65, False)):
        q = torch.randn(2, queries, 4, 64, device=DEVICE).bfloat16()
        flash_attn_with_kvcache(q, *caches, cache_seqlens=before, block_table=table)
        assert (launches[-1] is not None) == in_place


@pytest.mark.parametrize("kind", ["pages", "slots"])
def test_copies_for_many_queries(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that few queries would compute in place, so that both must agree."""
    for number in range(12):
        call = Call(kind, random.Random(f"copies {kind} {number}"))
        wanted = [call.expected(sequence) for sequence in range(call.batch)]
        with monkeypatch.context() as patch:
            patch.setattr(paged, "launch_of", lambda *_: None)
            patch.setattr("flashvar.ops.attention.kv_cache.launch_of", lambda *_: None)
            out, lse = call.run()
        for sequence, one in enumerate(wanted):
            if one is None:
                assert not out[sequence].any()
                continue
            torch.testing.assert_close(out[sequence], one[0][0], rtol=1.6e-2, atol=8e-3)
            torch.testing.assert_close(lse[sequence], one[1][0], rtol=1e-3, atol=2e-3)
