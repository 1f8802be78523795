"""Which calls Triton computes with the kernels for few queries, and what is compiled for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashvar.ops.attention.problem import Inputs, Options, Problem
from flashvar.ops.attention.validate import inspect

pytest.importorskip("triton", reason="triton is not installed")

from flashvar.backends.triton.attention import few_rows, split_kv, tiles

H200 = split_kv.Machine((9, 0), 227 * 1024, 132)


def problem(
    batch: int,
    queries: int,
    keys: int,
    heads: tuple[int, int],
    *,
    extras: dict[str, Any] | None = None,
    **options: Any,
) -> Problem:
    q = torch.empty(batch, queries, heads[0], 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, keys, heads[1], 64, dtype=torch.bfloat16, device="meta")
    return inspect(Inputs(q, k, k, **(extras or {})), Options(**options))


def arguments_of(
    given: Problem, machine: split_kv.Machine = H200, splits: int | None = None
) -> list[dict[str, Any]]:
    """The arguments of both kernels."""
    asked: list[dict[str, Any]] = []

    def bind(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> Any:
        asked.append(arguments)
        return kernel

    few_rows.forward(given, machine, splits, bind)
    return asked


@pytest.mark.parametrize(
    ("given", "serves"),
    [
        ((1, 1, 512, (8, 8)), True),
        ((1, 1, 511, (8, 8)), False),
        ((64, 8, 4096, (32, 8)), True),
        ((64, 9, 4096, (32, 8)), False),  # each of many heads has its own program
        ((64, 8, 4096, (40, 8)), False),  # 40 rows
        ((1, 64, 32768, (16, 8)), True),
        ((1, 65, 32768, (16, 8)), False),  # 130 rows
        ((1, 128, 4096, (32, 32)), True),  # 64 programs on 132 multiprocessors
        ((1, 128, 4096, (34, 34)), False),
        ((9, 1, 64, (32, 8)), True),  # keys are read once for four heads
        ((8, 1, 64, (32, 8)), False),
        ((17, 5, 64, (32, 8)), False),
        ((17, 1, 64, (24, 8)), False),
    ],
    ids=str,
)
def test_sizes(given: tuple[Any, ...], serves: bool) -> None:
    assert few_rows.is_faster(problem(*given), H200) == serves


def test_windows_leave_few_keys() -> None:
    given = (1, 1, 4096, (8, 8))
    assert not few_rows.is_faster(problem(*given, window_left=500, causal=True), H200)
    assert few_rows.is_faster(problem(*given, window_left=511, causal=True), H200)
    assert few_rows.is_faster(problem(*given, window_right=9), H200)


@pytest.mark.parametrize(
    ("given", "serves"),
    [
        ((8, 1, 512, (8, 8)), True),
        ((9, 1, 512, (8, 8)), False),  # 72 programs on 132 multiprocessors without splits
        ((9, 4, 512, (32, 8)), True),  # the other kernel reads keys for each of four heads
        ((9, 4, 512, (24, 8)), False),
        ((1, 16, 512, (8, 8)), True),
        ((1, 17, 512, (8, 8)), False),
        ((9, 1, 64, (32, 8)), False),
    ],
    ids=str,
)
def test_a_bias(given: tuple[Any, ...], serves: bool) -> None:
    """It is read for each score."""
    _, queries, keys, _ = given
    bias = torch.empty(1, 1, queries, keys, dtype=torch.bfloat16, device="meta")
    assert few_rows.is_faster(problem(*given, extras={"bias": bias}), H200) == serves


@pytest.mark.parametrize("feature", ["dropout", "packed keys"])
def test_what_only_the_other_kernel_computes(feature: str) -> None:
    if feature == "dropout":
        state = torch.empty(2, dtype=torch.int64, device="meta")
        found = problem(1, 1, 4096, (8, 8), extras={"rng_state": state}, dropout_p=0.5)
    else:
        q = torch.empty(4, 8, 64, dtype=torch.bfloat16, device="meta")
        offsets = torch.empty(5, dtype=torch.int32, device="meta")
        given = Inputs(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        found = inspect(given, Options(max_seqlen_q=1, max_seqlen_k=1))
    assert not few_rows.runs(found)
    assert not few_rows.is_faster(found, H200)


@pytest.mark.parametrize(("longest", "serves"), [(8, True), (9, False)])
def test_packed_queries(longest: int, serves: bool) -> None:
    """Results of splits have room for the longest sequence, as often as there are any."""
    q = torch.empty(40, 8, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(4, 4096, 8, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(5, dtype=torch.int32, device="meta")
    found = inspect(Inputs(q, k, k, cu_seqlens_q=offsets), Options(max_seqlen_q=longest))
    assert few_rows.is_faster(found, H200) == serves


@pytest.mark.parametrize(
    ("given", "window", "splits"),
    [
        ((1, 1, 4096, (8, 8)), {}, 16),  # of two blocks of keys each
        ((11, 1, 4096, (8, 8)), {}, 6),  # 528 programs run at a time
        ((1, 1, 65536, (8, 8)), {}, 64),
        ((1, 1, 511, (8, 8)), {}, 1),
        ((1, 1, 4096, (8, 8)), {"window_left": 1000, "causal": True}, 3),
        ((1, 1, 4096, (8, 8)), {"window_left": 1000}, 16),
        ((1, 1, 4096, (8, 8)), {"causal": True}, 16),
    ],
    ids=str,
)
def test_programs_share_the_keys_that_a_query_sees(
    given: tuple[Any, ...], window: dict[str, Any], splits: int
) -> None:
    asked = arguments_of(problem(*given, **window))
    assert {one["splits"] for one in asked} == {splits}


@pytest.mark.parametrize("splits", range(1, 65))
def test_few_kernels_merge_any_number_of_splits(splits: int) -> None:
    asked = arguments_of(problem(1, 1, 4096, (8, 8)), splits=splits)
    assert [one["splits"] for one in asked] == [splits] * 2
    of_merge = next(one for one in asked if "BLOCK_SPLITS" in one)
    assert of_merge["BLOCK_SPLITS"] == min(n for n in (2, 8, 64) if n >= splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tile_has_room_for_its_bias(dtype: torch.dtype) -> None:
    """Triton keeps blocks of a bias in shared memory, beside those of keys and values."""
    tile = split_kv.choose_tile(16, 64, 64, H200)
    needed = tiles.shared_bytes("forward", tile, 64, 64, (9, 0))
    just_enough = H200._replace(shared_memory=needed)
    assert split_kv.choose_tile(16, 64, 64, just_enough) == tile
    bias = torch.empty(1, 1, 16, 4096, dtype=dtype, device="meta")
    given = problem(1, 16, 4096, (8, 8), extras={"bias": bias})
    asked = arguments_of(given, just_enough, 1)
    assert max(one.get("BLOCK_KEYS", 0) for one in asked) < tile.block_kv
