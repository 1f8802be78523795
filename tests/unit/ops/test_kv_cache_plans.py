"""Plans of `flash_attn_with_kvcache`: what repeated calls share, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashvar import flash_attn
from flashvar.errors import DtypeError, InvalidInputError, LayoutError, ShapeError
from flashvar.ops.attention import kv_cache
from flashvar.ops.plans import Plans


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without those of other tests: of many calls only some are kept."""
    monkeypatch.setattr(kv_cache, "_plans", Plans())


def test_a_repeated_call_is_checked_for_what_may_differ(no_plans: None) -> None:
    """Its tensors have known sizes and dtypes; their memory and other numbers may differ."""
    call = flash_attn.flash_attn_with_kvcache
    q, k, v = (torch.randn(2, 1, 2, 8) for _ in range(3))
    k_cache, v_cache = torch.randn(2, 2, 16, 2, 8)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    for _ in range(2):
        call(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
        call(q, k_cache, v_cache, k, v, cache_seqlens=3)
    with pytest.raises(LayoutError, match="share memory"):
        call(q, k_cache, k_cache.view_as(k_cache), k, v, cache_seqlens=lengths)
    with pytest.raises(LayoutError, match="share memory"):
        call(q, k_cache, k_cache, k, v, cache_seqlens=lengths)
    with pytest.raises(InvalidInputError, match="must come with cache_seqlens"):
        call(q, k_cache, v_cache, k, v)
    with pytest.raises(InvalidInputError, match="cache_seqlens must be"):
        call(q, k_cache, v_cache, k, v, cache_seqlens=2.5)
    with pytest.raises(ShapeError, match="at most 16 keys"):
        call(q, k_cache, v_cache, k, v, cache_seqlens=lengths + 12)
    with pytest.raises(DtypeError, match="in the dtype of q"):
        call(q, k_cache.half(), v_cache, k, v, cache_seqlens=lengths)


def test_a_repeated_call_is_computed_with_its_own_options(no_plans: None) -> None:
    """Equal numbers of other types, and tensors whose values change, are options of their own."""
    q, k, v = torch.randn(1, 2, 2, 8), *torch.randn(2, 1, 16, 2, 8)
    scale = torch.tensor(0.5)

    def call(**options: Any) -> torch.Tensor:
        found: torch.Tensor = flash_attn.flash_attn_with_kvcache(q, k, v, **options)
        return found

    def expected(**options: Any) -> torch.Tensor:
        found: torch.Tensor = flash_attn.flash_attn_func(q, k, v, **options)
        return found

    for _ in range(2):
        for options in (
            {"causal": True},
            {"causal": False},
            {"softmax_scale": 1.0},
            {"softmax_scale": 2},
            {"window_size": (3, 0)},
            {"window_size": [4, 0]},
            {"softcap": 2.0},
        ):
            torch.testing.assert_close(call(**options), expected(**options))
        first = call(softmax_scale=scale)
        torch.testing.assert_close(first, expected(softmax_scale=float(scale)))
        scale *= 2
        torch.testing.assert_close(call(softmax_scale=scale), expected(softmax_scale=float(scale)))
    with pytest.raises(InvalidInputError, match="scale must be"):
        call(softmax_scale=True)


def test_a_plan_depends_on_the_dtype_of_autocast(
    no_plans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are read in place only where autocast casts nothing."""
    given = torch.randn(1, 1, 2, 8), *torch.randn(2, 4, 4, 2, 8)
    options = {"cache_seqlens": ints(9), "block_table": ints([0, 3, 2])}
    plans: list[object] = []
    make = kv_cache._make_plan
    monkeypatch.setattr(kv_cache, "_make_plan", lambda call: plans.append(0) or make(call))
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu"):  # the dtype for another device
                monkeypatch.setattr(kv_cache, "dtype_on", lambda device, dtype=dtype: dtype)
                flash_attn.flash_attn_with_kvcache(*given, **options)
    assert len(plans) == 2


def test_a_plan_depends_on_every_tensor(no_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that plans hold have the strides of all tensors."""
    q, (k, v) = torch.randn(2, 1, 2, 8), torch.randn(2, 4, 16, 2, 8)
    lengths, wide = ints(3, 4), torch.tensor([3, 4])
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_seqlens": wide},
        {"alibi_slopes": torch.rand(2)},
        {"alibi_slopes": torch.rand(2, 2)},
        {"cache_leftpad": ints(0, 1)},
        {"cache_batch_idx": ints(1, 0)},
        {"block_table": ints(1, 0)[:, None]},
        {"k": q, "v": q},
    ]
    plans: list[object] = []
    make = kv_cache._make_plan
    monkeypatch.setattr(kv_cache, "_make_plan", lambda call: plans.append(0) or make(call))
    for _ in range(2):
        for number, options in enumerate(kinds):
            given = {"cache_seqlens": lengths, "softcap": 1.0 + number // 3, **options}
            flash_attn.flash_attn_with_kvcache(q, k, v, **given)
    assert len(plans) == len(kinds)
