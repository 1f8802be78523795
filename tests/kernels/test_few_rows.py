"""The attention forward for at most 32 rows, run on the host."""

from __future__ import annotations

from dataclasses import replace

import host_program
import pytest
import torch
from host_few_rows import Config, FewRows, Library

pytestmark = host_program.needs_compiler

_WIDE = Config("bf16", 128, 128, 8)
_NARROW = Config("fp16", 64, 64, 16)
_PART_OF_A_LINE = Config("bf16", 80, 80, 16)
_WIDE_V = Config("fp16", 64, 128, 8)
_WIDE_K = Config("bf16", 192, 128, 16)
_TALL = Config("bf16", 96, 96, 32)
_TALL_WIDE_V = Config("fp16", 80, 128, 32)
_CONFIGS = (_WIDE, _NARROW, _PART_OF_A_LINE, _WIDE_V, _WIDE_K, _TALL, _TALL_WIDE_V)
_CAUSAL = (-1, 0)
# How the keys of a tile are divided: number of splits, whether they are a cluster.
_SPLITS = [(1, False), (2, False), (11, False), (3, True), (8, True)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("few_rows"), _CONFIGS)


@pytest.mark.parametrize("keys", [0, 1, 5, 31, 32, 64, 65, 127, 128, 129, 300, 700])
@pytest.mark.parametrize("config", _CONFIGS, ids=str)
def test_keys(config: Config, keys: int, library: Library) -> None:
    library.check(config, FewRows(config.rows, keys))
    library.check(config, FewRows(1, keys))


@pytest.mark.parametrize(
    ("config", "queries"),
    [
        (config, queries)
        for config in (_WIDE, _NARROW, _TALL)
        for queries in range(1, config.rows + 1)
    ],
    ids=str,
)
def test_rows(config: Config, queries: int, library: Library) -> None:
    """Tiles have rows that do not exist, also below those of other sequences."""
    for window in ((-1, -1), _CAUSAL):
        library.check(config, FewRows(queries, 150, heads=2, batch=2, window=window))


@pytest.mark.parametrize(
    ("config", "head_dim", "head_dim_v"),
    [
        (_PART_OF_A_LINE, 72, 72),
        (_PART_OF_A_LINE, 72, 64),
        (_WIDE, 104, 104),
        (_WIDE, 96, 128),
        (_WIDE, 120, 8),
        (_NARROW, 8, 64),
        (_NARROW, 40, 24),
        (_WIDE_V, 56, 88),
        (_WIDE_K, 136, 112),
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [(1, False), (2, False), (2, True)], ids=str)
def test_head_dims_are_padded(
    config: Config, head_dim: int, head_dim_v: int, split: tuple[int, bool], library: Library
) -> None:
    few = FewRows(config.rows, 270, 2, head_dim=head_dim, head_dim_v=head_dim_v)
    library.check(config, replace(few, splits=split[0], in_cluster=split[1]))


_SPLIT_CALLS = {
    "plain": FewRows(7, 600, 2),
    "causal": FewRows(6, 500, 4, 2, batch=2, window=_CAUSAL),
    "splits without keys": FewRows(8, 700, window=(20, 5)),
    "rows without keys": FewRows(8, 3, 2, window=_CAUSAL),
    "window": FewRows(4, 300, window=(150, -1)),
    "used keys": FewRows(5, 400, 2, batch=3, used=(0, 1, 333)),
    "sinks": FewRows(8, 300, 2, sinks=(1.5, -2.0)),
    "sinks alone": FewRows(4, 2, 2, window=_CAUSAL, sinks=(3.0, -1.0)),
    "no log-sum-exp": FewRows(3, 520, lse=False),
    "large scores": FewRows(8, 500, scale=1.5),
}


@pytest.mark.parametrize(("splits", "in_cluster"), _SPLITS)
@pytest.mark.parametrize("few", _SPLIT_CALLS.values(), ids=_SPLIT_CALLS)
def test_splits(few: FewRows, splits: int, in_cluster: bool, library: Library) -> None:
    """Of one block, merged by fwd_merge_kernel, and merged in a cluster."""
    library.check(_WIDE, replace(few, splits=splits, in_cluster=in_cluster))


@pytest.mark.parametrize(("splits", "in_cluster"), _SPLITS)
def test_splits_of_32_rows(splits: int, in_cluster: bool, library: Library) -> None:
    few = FewRows(30, 700, 2, batch=2, window=_CAUSAL, splits=splits, in_cluster=in_cluster)
    for config in (_TALL, _TALL_WIDE_V):
        library.check(config, few)
        library.check(config, replace(few, used=(0, 333), sinks=(1.5, -2.0)))


@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (20, 5), (130, 0), (-1, 40), (64, -1)])
@pytest.mark.parametrize("keys", [4, 150, 400])
@pytest.mark.parametrize("config", [_WIDE, _NARROW, _PART_OF_A_LINE, _TALL], ids=str)
def test_windows(config: Config, keys: int, window: tuple[int, int], library: Library) -> None:
    """With fewer keys than queries some rows see none."""
    library.check(config, FewRows(config.rows - 1, keys, window=window))


@pytest.mark.parametrize("scale", [-1.5, -0.1, 0.0, 0.02, 4.0])
@pytest.mark.parametrize("config", [_WIDE, _NARROW, _TALL], ids=str)
def test_scales(config: Config, scale: float, library: Library) -> None:
    """Of both signs; with large ones the maximum rises from block to block."""
    library.check(config, FewRows(config.rows, 450, scale=scale, window=(400, 3)))


@pytest.mark.parametrize(("splits", "in_cluster"), [(1, False), (3, True), (8, True)])
def test_very_negative_scores(splits: int, in_cluster: bool, library: Library) -> None:
    """A row whose scores are -2e8 still sees its keys.

    fwd_merge_kernel weights splits by log-sum-exps, which round too much for such scores.
    """
    few = FewRows(2, 700, equal=4096.0, splits=splits, in_cluster=in_cluster, lse=False)
    library.check(_WIDE, few)


@pytest.mark.parametrize("packed_keys", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (63,), (64,), (65,), (200,), (299,)], ids=str)
@pytest.mark.parametrize("config", [_WIDE, _NARROW, _PART_OF_A_LINE, _TALL], ids=str)
def test_keys_after_those_in_use_count_for_nothing(
    config: Config, used: tuple[int], packed_keys: bool, library: Library
) -> None:
    few = FewRows(config.rows - 3, 300, 2, batch=2, used=used, packed_keys=packed_keys)
    library.check(config, few)


# With several queries row 4 q + m, or 2 q + m, is member m of query q.
_PACKED_CALLS = {
    "one query": FewRows(1, 400, 6, 6, batch=2),
    "one query, window": FewRows(1, 400, 6, 3, batch=2, window=(200, 0)),
    "one query, used keys": FewRows(1, 300, 6, 2, batch=3, used=(299, 40, 0)),
    "3 members of 4": FewRows(2, 400, 6, 3, batch=2, row_shift=2, window=_CAUSAL),
    "3 members of 4, used keys": FewRows(2, 300, 6, 3, batch=2, row_shift=2, used=(150, 0)),
    "2 members of 2": FewRows(4, 200, 6, 2, row_shift=1, window=(90, 1)),
    "rows without keys": FewRows(3, 2, 6, 2, batch=2, row_shift=1, window=_CAUSAL),
}


@pytest.mark.parametrize("sinks", [(), (1.0, -3.0, 0.0, 5.0, 2.0, -1.0)], ids=["", "sinks"])
@pytest.mark.parametrize(("splits", "in_cluster"), _SPLITS)
@pytest.mark.parametrize("few", _PACKED_CALLS.values(), ids=_PACKED_CALLS)
def test_packed_heads(
    few: FewRows, splits: int, in_cluster: bool, sinks: tuple[float, ...], library: Library
) -> None:
    few = replace(few, splits=splits, in_cluster=in_cluster, sinks=sinks)
    library.check(_WIDE_V, few)


def test_many_rows_of_packed_heads(library: Library) -> None:
    """All rows; those of 11 heads, which leave 5; 5 members of 8."""
    library.check(_TALL, FewRows(8, 200, 8, 4, row_shift=2, window=_CAUSAL))
    library.check(_TALL, FewRows(1, 300, 62, 31, sinks=tuple(range(62)), splits=2))
    library.check(_TALL, FewRows(3, 200, 10, 5, row_shift=3, splits=2, in_cluster=True))
    library.check(_NARROW, FewRows(4, 200, 8, 4, row_shift=2, window=_CAUSAL))
    library.check(_NARROW, FewRows(1, 200, 22, 11, window=(100, 0), sinks=tuple(range(22))))
    library.check(_NARROW, FewRows(2, 200, 10, 5, row_shift=3, splits=2, in_cluster=True))


@pytest.mark.parametrize(("splits", "in_cluster"), _SPLITS)
@pytest.mark.parametrize("window", [(-1, -1), (100, 0)], ids=str)
def test_packed_queries(
    splits: int, in_cluster: bool, window: tuple[int, int], library: Library
) -> None:
    """Rows that belong to no sequence get 0 and -inf."""
    few = FewRows(7, 300, 4, 2, lengths_q=(3, 0, 7, 1), outside=4, packed_keys=True, window=window)
    library.check(_WIDE, replace(few, splits=splits, in_cluster=in_cluster, used=(300, 2, 199, 0)))


@pytest.mark.parametrize(("splits", "in_cluster"), _SPLITS)
def test_packed_heads_of_packed_queries(splits: int, in_cluster: bool, library: Library) -> None:
    few = FewRows(1, 300, 8, 4, lengths_q=(1, 0, 1, 1), outside=2)
    few = replace(few, splits=splits, in_cluster=in_cluster)
    library.check(_WIDE, few)
    library.check(_WIDE, replace(few, sinks=tuple(range(-4, 4)), used=(300, 1, 0, 130)))


@pytest.mark.parametrize(("splits", "in_cluster"), [(1, False), (3, True)])
@pytest.mark.parametrize("window", [(-1, -1), _CAUSAL, (100, 2)], ids=str)
def test_packed_heads_of_several_packed_queries(
    splits: int, in_cluster: bool, window: tuple[int, int], library: Library
) -> None:
    """Each sequence has other queries and keys. Rows of no sequence get 0 and -inf."""
    few = FewRows(2, 300, 6, 3, lengths_q=(2, 0, 1, 2), outside=3, row_shift=2, window=window)
    few = replace(few, splits=splits, in_cluster=in_cluster, used=(300, 2, 199, 1))
    library.check(_WIDE, few)
    library.check(_WIDE, replace(few, packed_keys=True, sinks=tuple(range(6))))
    many = replace(few, queries=8, lengths_q=(8, 1, 5, 7), used=(4, 300, 0, 150))
    library.check(_TALL, replace(many, heads=8, group=4))
    five = replace(many, queries=4, heads=5, group=5, row_shift=3, lengths_q=(4, 1, 3, 2))
    library.check(_TALL, five)


@pytest.mark.parametrize("in_cluster", [False, True])
def test_more_queries_of_packed_heads_than_a_tile_has(in_cluster: bool, library: Library) -> None:
    few = FewRows(4, 200, 4, 2, lengths_q=(1, 6, 0, 4), row_shift=1)
    _, out, lse = library.run(
        _WIDE, replace(few, splits=3 if in_cluster else 1, in_cluster=in_cluster)
    )
    without_a_tile = torch.arange(11).ge(5) & torch.arange(11).lt(7)
    assert torch.equal(out.isnan().all(-1).all(-1), without_a_tile)
    assert torch.equal(out.isnan().any(-1).any(-1), without_a_tile)
    assert torch.equal(lse.isnan().all(0), without_a_tile)


@pytest.mark.parametrize("outside", [1, 5, 40])
@pytest.mark.parametrize(("heads", "sequences"), [(8, 1), (8, 3), (3, 4), (4, 9)], ids=str)
def test_rows_of_no_sequence(heads: int, sequences: int, outside: int, library: Library) -> None:
    """With fewer heads than blocks, and with more."""
    group = heads // 2 if heads % 2 == 0 else heads
    lengths = (1, 0, 1) * 3
    few = FewRows(1, 40, heads, group, lengths_q=lengths[:sequences], outside=outside)
    library.check(_WIDE, few)
    library.check(_WIDE, replace(few, splits=2, in_cluster=True, keys=300))


@pytest.mark.parametrize(("splits", "in_cluster"), [(1, False), (3, False), (2, True)])
def test_second_queries_of_packed_heads(splits: int, in_cluster: bool, library: Library) -> None:
    """The bound said that there are none: they are NaN, and no others."""
    few = FewRows(1, 200, 4, 2, lengths_q=(1, 3, 0, 1), splits=splits, in_cluster=in_cluster)
    _, out, lse = library.run(_WIDE, few)
    without_a_tile = torch.tensor([False, False, True, True, False])
    assert torch.equal(out.isnan().all(-1).all(-1), without_a_tile)
    assert torch.equal(out.isnan().any(-1).any(-1), without_a_tile)
    assert torch.equal(lse.isnan().all(0), without_a_tile)


@pytest.mark.parametrize(("splits", "in_cluster"), [(1, False), (3, False), (2, True)])
def test_queries_beyond_a_bound_that_is_too_small(
    splits: int, in_cluster: bool, library: Library
) -> None:
    """Rows that the tile does not have are NaN, and no others."""
    few = FewRows(3, 200, 2, lengths_q=(20, 2), splits=splits, in_cluster=in_cluster)
    _, *found = library.run(_WIDE, few)
    without_a_tile = torch.arange(22).ge(_WIDE.rows) & torch.arange(22).lt(20)
    out, lse = found
    assert torch.equal(out.isnan().all(-1).all(-1), without_a_tile)
    assert torch.equal(out.isnan().any(-1).any(-1), without_a_tile)
    assert torch.equal(lse.isnan().all(0), without_a_tile)


def test_a_device_that_runs_no_clusters(library: Library) -> None:
    few = FewRows(7, 600, 2, splits=3, in_cluster=True, runs_clusters=False)
    library.check(_WIDE, few)


def test_one_stage(library: Library) -> None:
    """More blocks than SMs, each of which waits for its loads."""
    library.check(_WIDE, FewRows(2, 200, heads=133))
