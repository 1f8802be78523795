"""When the forward of 9.0 packs the query heads of a group (PackGQA), on the host."""

from __future__ import annotations

import ctypes
from itertools import product

import host_forward_variants
import host_program
import pytest
from host_forward_variants import ROWS_8, ROWS_16, ROWS_32, SMALL, SMALL_SPLIT

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_forward_variants.library(tmp_path_factory.mktemp("forward"))


@pytest.mark.parametrize(
    ("head_dim", "sizes", "packs"),
    [
        # Many keys, which tiles of one head each would read once for each head of a group.
        (64, (1, 16, 4096, 32, 4), True),
        (64, (16, 4, 1024, 32, 4), True),
        # The tiles of all heads run at the same time, and end before others would be merged.
        (64, (4, 16, 512, 21, 7), False),
        (64, (1, 16, 512, 48, 4), False),
        (256, (4, 8, 512, 14, 7), False),
        # They do not run at the same time.
        (64, (256, 4, 512, 32, 4), True),
        (64, (256, 4, 128, 32, 4), True),
        (256, (64, 4, 256, 32, 4), True),
        # As many bytes to merge as there are in few keys.
        (64, (256, 9, 127, 32, 4), False),
    ],
)
def test_heads_are_packed_where_merging_takes_less_than_it_saves(
    head_dim: int, sizes: tuple[int, ...], packs: bool, library: ctypes.CDLL
) -> None:
    assert library.packs(head_dim, *sizes, -1, -1, 0) == packs


@pytest.mark.parametrize(
    ("call", "variant"),
    [
        # Sequences, queries, keys, heads, group.
        ((1, 2, 32, 8, 4), ROWS_8),
        ((9, 3, 70, 32, 2), ROWS_8),  # 6 rows
        ((200, 2, 5000, 12, 3), ROWS_8),  # 8, of which 6 exist
        ((34, 4, 32, 4, 4), ROWS_16),  # 136 tiles of one head
        ((100, 2, 127, 64, 8), ROWS_16),
        ((100, 3, 127, 64, 8), ROWS_32),
        ((9, 2, 40, 16, 16), ROWS_32),  # 144 tiles of one head
    ],
    ids=str,
)
def test_few_rows_of_packed_heads_need_no_second_kernel(
    call: tuple[int, ...], variant: int, library: ctypes.CDLL
) -> None:
    for head_dim in (64, 128, 256):
        assert library.packs(head_dim, *call, -1, -1, 0)
        assert library.variant(head_dim, *call, -1, 0) == variant


@pytest.mark.parametrize(
    "call",
    [
        (1, 2, 32, 10, 5),  # 16 rows, and all tiles of 8 run at the same time
        (33, 4, 32, 4, 4),
        (16, 8, 32, 8, 4),
        (600, 10, 32, 4, 4),  # 40 rows
        (600, 2, 32, 33, 33),
        (600, 2, 32, 4, 1),
    ],
    ids=str,
)
def test_few_keys_of_heads_that_are_not_packed(call: tuple[int, ...], library: ctypes.CDLL) -> None:
    for head_dim in (64, 128, 256):
        assert not library.packs(head_dim, *call, -1, -1, 0)


@pytest.mark.parametrize("call", [(1, 2, 4000, 8, 4), (200, 4, 4000, 16, 4)], ids=str)
def test_heads_with_modifiers_are_not_packed(call: tuple[int, ...], library: ctypes.CDLL) -> None:
    modifiers = 1
    for head_dim in (64, 128, 256):
        assert library.packs(head_dim, *call, -1, -1, 0)
        assert not library.packs(head_dim, *call, -1, -1, modifiers)


@pytest.mark.parametrize("queries", range(2, 20))
@pytest.mark.parametrize(("batch", "keys"), [(1, 40), (1, 8192), (40, 40), (40, 8192)])
def test_varlen_queries_are_packed_up_to_32_rows(
    batch: int, keys: int, queries: int, library: ctypes.CDLL
) -> None:
    """Where dense ones are. No other kernel finds their rows."""
    for head_dim, (heads, group) in product((64, 128, 256), ((8, 2), (8, 4), (12, 6), (16, 16))):
        call = (head_dim, batch, queries, keys, heads, group)
        rows = queries << (group - 1).bit_length()
        packs = library.packs(*call, -1, -1, 2)
        assert packs == (rows <= 32 and library.packs(*call, -1, -1, 0))
        assert packs or rows > 8
        if packs:
            assert library.variant(*call, -1, 3) in (ROWS_8, ROWS_16, ROWS_32)


def test_a_few_tiles_of_varlen_queries_with_very_many_keys(library: ctypes.CDLL) -> None:
    """Which would need more splits than a cluster has."""
    varlen = 2
    for batch, keys, packs in ((1, 8192, True), (3, 8193, False), (4, 8193, True)):
        assert library.packs(128, batch, 4, keys, 8, 8, -1, -1, varlen) == packs
        assert library.packs(128, batch, 4, keys, 8, 8, -1, -1, 0)
    assert library.packs(128, 1, 4, 100_000, 8, 8, 4000, 0, varlen)  # with a window


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [2, 5, 8])
@pytest.mark.parametrize(
    ("batch", "keys", "heads", "group", "left", "right"),
    [
        (2, 2417, 8, 4, -1, -1),  # test_attention_few_queries.py of tests/gpu
        (64, 301, 8, 4, -1, -1),
        (64, 301, 12, 6, -1, 0),
        (50, 1217, 8, 4, 700, 2),
        (50, 1217, 8, 4, 300, 0),
        (50, 1217, 6, 3, 700, 2),
        (50, 1217, 7, 7, 700, 2),
        (24, 1217, 24, 12, 700, 2),
        (24, 1217, 24, 12, 300, 0),
        (24, 1217, 64, 64, 300, 0),
        (54, 4097, 8, 4, 700, 0),  # test_attention_cache.py
        (54, 4097, 6, 3, 700, 0),
    ],
)
def test_calls_that_test_packed_heads_pack_them(
    batch: int,
    keys: int,
    heads: int,
    group: int,
    left: int,
    right: int,
    queries: int,
    head_dim: int,
    library: ctypes.CDLL,
) -> None:
    assert library.packs(head_dim, batch, queries, keys, heads, group, left, right, 0)


@pytest.mark.parametrize(
    ("group", "expected"), [(4, ROWS_8), (16, ROWS_16), (32, ROWS_32), (64, SMALL_SPLIT)]
)
def test_two_kernels_add_the_sinks_of_packed_groups(
    group: int, expected: int, library: ctypes.CDLL
) -> None:
    packed, of_one_head = (512, 1, 200, group, group, -1), (512, 1, 200, group, 1, -1)
    assert library.variant(128, *packed, 0) == SMALL
    assert library.variant(128, *packed, 1) == expected
    assert library.variant(128, *of_one_head, 1) == SMALL
