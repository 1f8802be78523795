"""`flash_attn_with_kvcache` on padding sequences: called, in graphs, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_call import DEVICE
from graphs_and_streams import captured

from flashvar.flash_attn import flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("seed")

HEADS, HEADS_K, D, PAGE, PAGES = 8, 2, 128, 64, 4
_NO_PAGES = (-1,) * PAGES


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# The integers of a call whose sequences are all real, those of one with others, and its real ones.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "in order": (
        {"cache_seqlens": (70, 0, 130)},
        {"cache_seqlens": (31, -1, 0)},
        (0, 2),
    ),
    "slots": (
        {"cache_seqlens": (70, 0, 130), "cache_batch_idx": (4, 0, 2)},
        {"cache_seqlens": (-1, 0, 50), "cache_batch_idx": (3, 3, -1)},
        (1,),
    ),
    "pages": (
        {
            "cache_seqlens": (70, 0, 130),
            "block_table": ((7, 1, 9, -1), (2, 0, -1, -1), (3, 8, 6, 4)),
        },
        {"cache_seqlens": (63, -1, 5), "block_table": ((5, 2, -1, -1), _NO_PAGES, _NO_PAGES)},
        (0,),
    ),
    "none": ({"cache_seqlens": (70, 0, 130)}, {"cache_seqlens": (-1, -1, -1)}, ()),
}


def alone(given: dict[str, torch.Tensor], real: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The arguments of a call with the real sequences alone."""
    kept = {name: x if name.startswith("rotary") else x[list(real)] for name, x in given.items()}
    if "block_table" not in given and "cache_batch_idx" not in given:
        kept["cache_batch_idx"] = ints(*real)
    return kept


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("way", ["called", "graph", "compiled"])
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_padding_sequences(case: str, new: int, way: str) -> None:
    first, second, real = CASES[case]
    places = (10, PAGE) if case == "pages" else (5, PAGE * PAGES)
    k_cache, v_cache = torch.randn(2, *places, HEADS_K, D, device=DEVICE).bfloat16()
    given = {"q": torch.randn(3, max(new, 1), HEADS, D, device=DEVICE).bfloat16()}
    if new:
        angles = torch.rand(PAGE * PAGES, D // 2, device=DEVICE)
        given |= {name: torch.randn(3, new, HEADS_K, D, device=DEVICE).bfloat16() for name in "kv"}
        given |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    given |= {name: ints(*values) for name, values in first.items()}

    def step() -> Any:
        return flash_attn_with_kvcache(
            k_cache=k_cache, v_cache=v_cache, **given, causal=True, return_softmax_lse=True
        )

    run, results = step, None
    if way == "graph":
        graph, results = captured(step)
        run = graph.replay
    elif way == "compiled":
        torch._dynamo.reset()
        run = torch.compile(step, fullgraph=True)
        run()
    # The rows of the first call stay: the second one is another batch in the same memory.
    for name, values in second.items():
        given[name].copy_(ints(*values))
    others = k_cache.clone(), v_cache.clone()
    found = run()
    out, lse = found if results is None else results
    if real:
        kept = alone(given, real)
        wanted, of_sums = flash_attn_with_kvcache(
            *(kept.pop("q"), *others), **kept, causal=True, return_softmax_lse=True
        )
        torch.testing.assert_close(out[list(real)], wanted, rtol=1.6e-2, atol=5e-3)
        torch.testing.assert_close(lse[list(real)], of_sums, rtol=1e-4, atol=1e-4)
    for sequence in {0, 1, 2} - set(real):
        assert not out[sequence].any()
        assert (lse[sequence] == -torch.inf).all()
    assert torch.equal(k_cache, others[0])
    assert torch.equal(v_cache, others[1])


@pytest.mark.filterwarnings("ignore")  # the profiler's own
@pytest.mark.parametrize("paged", [False, True])
def test_launches_of_a_call(paged: bool) -> None:
    """New keys are written by one kernel."""
    k_cache, v_cache = torch.randn(2, 4, PAGE, HEADS_K, D, device=DEVICE).bfloat16()
    q, k, v = (torch.randn(2, 1, h, D, device=DEVICE).bfloat16() for h in (HEADS, HEADS_K, HEADS_K))
    table = ints((0, 1), (2, 3)) if paged else None

    def step() -> Any:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=ints(5, 7), block_table=table
        )

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    names = [event.name for event in profile.events()]
    assert sum("append_kernel" in name for name in names) == 1
    assert not any("index_put" in name or "index_elementwise" in name for name in names)
