"""Which tiles the forward of 9.0 takes for a call, on the host."""

from __future__ import annotations

import ctypes

import host_forward_variants
import host_program
import pytest
from host_forward_variants import (
    GENERAL,
    LINES,
    MEDIUM,
    MODIFIERS,
    ROWS_8,
    ROWS_16,
    ROWS_32,
    SMALL,
    SMALL_MODIFIERS,
    SMALL_SPLIT,
    SPLIT,
    WIDE,
)

pytestmark = host_program.needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_forward_variants.library(tmp_path_factory.mktemp("forward"))


@pytest.mark.parametrize(
    ("head_dim", "call", "expected"),
    [
        (64, (4, 16384, 16384, 32, 1, -1), GENERAL),
        (64, (4, 4096, 4096, 32, 1, 0), MEDIUM),
        (64, (64, 197, 197, 16, 1, -1), WIDE),  # 59 rows beyond the last query instead of 187
        (64, (512, 49, 49, 8, 1, -1), SMALL),
        (64, (64, 384, 384, 12, 1, 0), SMALL),
        (128, (512, 49, 49, 8, 1, -1), SMALL),
        (128, (64, 197, 197, 16, 1, -1), WIDE),
        (64, (8, 4096, 77, 10, 1, -1), WIDE),  # one step of 80 keys instead of two of 64
        (128, (32, 1024, 77, 8, 1, -1), WIDE),
        (64, (64, 77, 77, 12, 1, 0), WIDE),
        (64, (64, 100, 100, 12, 1, 0), SMALL),  # under a mask steps of 64 hide less
        (64, (64, 64, 77, 12, 1, -1), SMALL),  # one tile
        (64, (64, 128, 128, 12, 1, -1), SMALL),
        (64, (64, 384, 384, 12, 1, -1), SMALL),
        (64, (64, 512, 512, 12, 1, -1), SMALL),
        (128, (64, 100, 100, 8, 1, -1), SMALL),
        (64, (32, 257, 257, 16, 1, -1), WIDE),  # one key in the last step of 64
        (64, (56, 577, 577, 12, 1, -1), WIDE),
        (64, (8, 1500, 1500, 20, 1, -1), GENERAL),
        (128, (8, 1024, 1024, 16, 1, 0), MEDIUM),
        (128, (1, 512, 8192, 32, 4, -1), MEDIUM),  # 128 tiles instead of 96
        (128, (2, 2000, 2000, 12, 1, -1), GENERAL),
        (128, (1, 16384, 16384, 16, 1, -1), GENERAL),
        (64, (1, 512, 50176, 8, 1, -1), SPLIT),
        (64, (1, 65, 8192, 8, 1, -1), SPLIT),
        (64, (1, 64, 8192, 8, 1, -1), SMALL_SPLIT),
        (128, (1, 9, 8192, 32, 4, 0), SMALL_SPLIT),  # 36 rows of packed heads
        (128, (1, 17, 8192, 8, 1, 0), SMALL_SPLIT),
        (128, (1, 17, 512, 8, 1, -1), SMALL_SPLIT),
        (128, (32, 17, 4096, 8, 1, -1), SMALL),  # 256 tiles, two for each SM
        (256, (1, 17, 8192, 8, 1, -1), SPLIT),
        (256, (2, 4096, 4096, 16, 2, 0), GENERAL),
        (64, (1, 2048, 2048, 8, 1, 0), SMALL),  # 256 tiles instead of 64
        (64, (4, 8192, 8192, 16, 1, 0), MEDIUM),
        (64, (4, 1024, 1024, 16, 1, -1), MEDIUM),  # two waves of larger tiles would be three
        (128, (1, 512, 512, 16, 1, 0), SMALL),
        (128, (4, 3072, 3072, 16, 1, 0), GENERAL),  # 16 tiles of 192 rows, none partly filled
        (128, (16, 128, 4096, 16, 1, -1), MEDIUM),  # small tiles would load all keys twice
        (64, (16, 256, 4096, 16, 1, -1), MEDIUM),
        (64, (16, 200, 8192, 12, 1, -1), SPLIT),  # 128 rows: 3 waves of halves instead of 2
        (64, (4, 256, 8192, 16, 1, -1), SPLIT),
        (
            64,
            (16, 200, 3001, 12, 1, -1),
            SPLIT,
        ),  # test_attention_rows_inside_lines.py of tests/gpu
        (64, (4, 256, 5000, 16, 1, -1), SPLIT),
        (64, (4, 129, 2000, 12, 1, 0), SPLIT),
    ],
)
def test_the_forward_takes_the_tiles_that_waste_least(
    head_dim: int, call: tuple[int, ...], expected: int, library: ctypes.CDLL
) -> None:
    assert library.variant(head_dim, *call, 0) == expected


@pytest.mark.parametrize(
    ("head_dim", "call", "expected"),
    [
        (64, (8, 1, 1000, 8, 1, -1), ROWS_8),
        (64, (8, 8, 1000, 8, 1, 0), ROWS_8),
        (64, (8, 9, 1000, 8, 1, 0), ROWS_16),
        (64, (8, 16, 1000, 8, 1, -1), ROWS_16),
        (64, (8, 17, 1000, 8, 1, -1), SMALL),
        (128, (1, 1, 512, 32, 4, -1), ROWS_8),
        (128, (1, 1, 8192, 32, 4, 0), ROWS_8),  # 4 rows: the heads of a group
        (128, (1, 4, 8192, 32, 4, 0), ROWS_16),
        (128, (32, 1, 4096, 32, 4, -1), ROWS_8),
        (256, (1, 1, 8192, 8, 8, -1), ROWS_8),
        (256, (1, 1, 8192, 16, 16, -1), ROWS_16),
        # Not more tiles than three for each SM.
        (64, (99, 1, 4096, 4, 1, -1), ROWS_8),
        (64, (397, 1, 4096, 1, 1, -1), SMALL),
        (128, (49, 1, 4096, 32, 4, -1), ROWS_8),
        (128, (50, 1, 4096, 32, 4, -1), SMALL),
        # Any number of tiles whose results others would have to merge.
        (128, (256, 4, 4096, 32, 4, -1), ROWS_16),
        (128, (256, 5, 4096, 32, 4, -1), ROWS_32),
        (128, (256, 9, 4096, 32, 4, -1), SMALL_SPLIT),
        (256, (256, 5, 4096, 32, 4, -1), ROWS_32),
        # Above head dim 128 no others have small tiles.
        (256, (512, 1, 4096, 8, 1, -1), ROWS_8),
        # More than 16 rows only of packed heads, and not more tiles than SMs.
        (256, (512, 17, 4096, 8, 1, -1), GENERAL),
        (128, (132, 1, 200, 32, 32, -1), ROWS_32),
        (128, (133, 1, 200, 32, 32, -1), SMALL),
        (256, (133, 1, 200, 32, 32, -1), GENERAL),
    ],
)
def test_few_rows_have_a_kernel(
    head_dim: int, call: tuple[int, ...], expected: int, library: ctypes.CDLL
) -> None:
    assert library.variant(head_dim, *call, 0) == expected


@pytest.mark.parametrize(
    ("call", "strides", "what", "expected"),
    [
        ((72, 33, 1, 1217), (576, 576, 72), 0, LINES),
        ((96, 33, 64, 1217), (768, 768, 96), 0, LINES),
        ((112, 33, 5, 1217), (896, 896, 112), 0, LINES),
        ((104, 33, 5, 1217), (840, 832, 104), 0, LINES),  # rows of v alone are moved
        ((104, 33, 17, 1217), (840, 840, 104), 0, SMALL),
        ((120, 33, 17, 1217), (960, 960, 120), 0, SMALL),  # one of 8 heads
        ((96, 33, 17, 1217), (1024, 1024, 128), 0, SMALL),  # rows start at lines
        ((128, 33, 17, 1217), (1024, 1024, 128), 0, SMALL),
        ((64, 33, 17, 1217), (512, 512, 64), 0, SMALL),
        ((96, 33, 17, 1023), (768, 768, 96), 0, SMALL),
        ((96, 20, 17, 1217), (768, 768, 96), 0, SMALL),  # 28 of 160 tiles in a second round
        ((96, 33, 65, 1217), (768, 768, 96), 0, MEDIUM),
        ((96, 2, 17, 2417), (768, 768, 96), 0, SMALL_SPLIT),
        ((72, 33, 17, 4095), (576, 576, 72), 1, SMALL),  # fewer keys may be in use
        ((72, 33, 1, 4096), (576, 576, 72), 1, LINES),
        ((72, 33, 1, 1217), (576, 576, 72), 2, LINES),  # PackGQA
        # Few rows whose tiles do not move them.
        ((104, 33, 5, 1217), (840, 840, 104), 0, ROWS_8),
        ((120, 33, 9, 1217), (960, 960, 120), 0, ROWS_16),
        ((96, 33, 1, 1217), (1024, 1024, 128), 0, ROWS_8),
        ((64, 33, 5, 1217), (512, 512, 64), 0, ROWS_8),
        ((96, 33, 1, 1023), (768, 768, 96), 0, ROWS_8),
        ((96, 20, 1, 1217), (768, 768, 96), 0, ROWS_8),
        ((96, 50, 1, 1217), (768, 768, 96), 0, SMALL),  # 400 tiles
        ((96, 2, 1, 2417), (768, 768, 96), 0, ROWS_8),
        ((72, 33, 1, 4095), (576, 576, 72), 1, ROWS_8),
        ((72, 33, 5, 1217), (576, 576, 72), 2, ROWS_16),  # PackGQA, whose results are merged
        ((72, 33, 40, 1217), (576, 576, 72), 2, SMALL),  # two tiles load the same keys
    ],
)
def test_few_queries_take_the_tiles_that_move_rows_to_lines(
    call: tuple[int, ...],
    strides: tuple[int, ...],
    what: int,
    expected: int,
    library: ctypes.CDLL,
) -> None:
    assert library.variant_of_rows(*call, *strides, what) == expected


@pytest.mark.parametrize("what", [0, 1], ids=["dense", "packed-keys"])
@pytest.mark.parametrize("keys", [1217, 4200, 16384])
@pytest.mark.parametrize("queries", [1, 5, 16, 17, 32])
def test_the_workspace_is_as_large_wherever_rows_start(
    queries: int, keys: int, what: int, library: ctypes.CDLL
) -> None:
    """A caller may have asked for its size with other distances of rows."""
    taken = set()
    for batch in (1, 4, 8, 12, 15, 16, 17, 33):
        call = (72, batch, queries, keys)
        for strides in ((576, 576, 72), (1024, 1024, 128)):
            taken.add(library.variant_of_rows(*call, *strides, what))
        moved, unmoved = (
            library.split_bytes_of_rows(*call, *strides, what)
            for strides in ((576, 576, 72), (1024, 1024, 128))
        )
        assert moved == unmoved, call
    assert (LINES in taken) == (keys >= (4096 if what else 1024)), taken


@pytest.mark.parametrize(
    ("head_dim", "other"),
    [(16, 32), (40, 24), (64, 128), (72, 64), (96, 64), (104, 64), (128, 64)],
)
@pytest.mark.parametrize("lengths", [(96, 77), (300, 77), (100, 257), (300, 65)], ids=str)
def test_steps_of_80_keys_are_of_known_lengths(
    head_dim: int, other: int, lengths: tuple[int, int], library: ctypes.CDLL
) -> None:
    """Those of test_attention_tiles.py of tests/gpu; not of packed sequences."""

    def variant(head_dim_v: int, right: int = -1, what: int = 0) -> int:
        return int(library.variant_of_dims(head_dim, head_dim_v, 48, *lengths, -1, right, what))

    assert variant(head_dim) == variant(other) == variant(head_dim, what=2) == WIDE
    assert variant(head_dim, what=1) != WIDE
    if lengths[1] <= 80:
        assert variant(head_dim, right=0) == WIDE


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Rows of K or V that are an odd multiple of 16 bytes take longer in small tiles.
        ((80, 80, 48, 200, 100, -1, -1, 0), SMALL),
        ((80, 72, 48, 200, 100, -1, -1, 0), MEDIUM),
        ((80, 64, 8, 2048, 300, -1, -1, 0), SMALL),
        ((72, 64, 8, 2048, 300, -1, -1, 0), MEDIUM),
        ((72, 72, 3, 4096, 300, -1, -1, 0), GENERAL),
        ((72, 72, 3, 17, 129, -1, -1, 0), SMALL),  # not if one tile has all queries
        # All keys are visible, or steps of 80 hide more than those of 64.
        ((80, 80, 3, 257, 197, -1, -1, 0), WIDE),
        ((80, 80, 3, 257, 197, 32, -1, 0), SMALL),
        ((128, 128, 8, 128, 130, -1, -1, 0), WIDE),
        ((128, 128, 8, 128, 130, -1, 0, 0), SMALL),
        # A few keys in the last step of several; their number is known, and none is hidden.
        ((104, 104, 8, 300, 8, -1, -1, 0), SMALL),
        ((96, 96, 48, 2048, 130, -1, -1, 0), WIDE),
        ((96, 96, 48, 2048, 130, -1, -1, 1), SMALL),
        ((128, 128, 16, 1024, 321, -1, -1, 0), MEDIUM),
        ((128, 128, 16, 1024, 321, -1, 32, 0), SMALL),
    ],
)
def test_what_makes_steps_of_small_tiles_longer(
    call: tuple[int, ...], expected: int, library: ctypes.CDLL
) -> None:
    assert library.variant_of_dims(*call) == expected


@pytest.mark.parametrize("head_dim", [72, 80, 88, 96, 104, 112])
def test_calls_that_test_moved_rows_move_them(head_dim: int, library: ctypes.CDLL) -> None:
    """Those of test_attention_rows_inside_lines.py of tests/gpu."""
    wide = -(-8 * head_dim // 64) * 64 + 64
    for queries, keys, what in ((1, 1217, 2), (5, 1217, 0), (64, 1217, 0), (2, 4200, 1)):
        sizes, strides = (33, queries, keys), (wide, wide, head_dim)
        assert library.variant_of_rows(head_dim, *sizes, *strides, what) == LINES


@pytest.mark.parametrize(
    ("head_dim", "length", "expected"),
    [
        (64, 8, SMALL_MODIFIERS),
        (64, 49, SMALL_MODIFIERS),
        (64, 128, SMALL_MODIFIERS),
        (64, 1024, MODIFIERS),
        (128, 64, SMALL_MODIFIERS),
        (128, 2048, MODIFIERS),
        (256, 8, MODIFIERS),
        (256, 64, MODIFIERS),
    ],
)
def test_tiles_of_calls_with_modifiers(
    head_dim: int, length: int, expected: int, library: ctypes.CDLL
) -> None:
    assert library.variant(head_dim, 32, length, length, 8, 1, -1, 2) == expected
