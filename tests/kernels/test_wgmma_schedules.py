"""What the launchers of 9.0 choose, and which tiles a schedule has, on the host."""

from __future__ import annotations

import ctypes
from collections import Counter

import host_attention
import host_program
import pytest

pytestmark = host_program.needs_compiler

# What the tiles' headers take of another, which needs the driver's headers.
_PIPELINE = """
#pragma once
namespace flashvar::sm90 {
inline constexpr int kColBlockCols = 64;
}
"""
_HEADERS = """
#define __CUDACC__
#include <algorithm>
#include "device.h"
using std::max, std::min;
#include "core/dtype.cuh"
#include "sm90/attention/bwd_variants.h"
#include "sm90/attention/fwd_variants.h"
#include "sm90/attention/key_tile_splits.h"
#include "sm90/attention/pair_schedule.cuh"
using namespace flashvar;
using namespace flashvar::sm90::attention;
"""
_FUNCTIONS = """
template <int kHeadDim>
using VariantsOf = FwdVariants<Target<90, 232448>, dtype::bf16, kHeadDim, kHeadDim>;

template <int kHeadDim>
int variant_of(const FwdProblem& call) {
  using Variants = VariantsOf<kHeadDim>;
  FwdProblem const problem = simplified(call, Variants::kPackGqaTile);
  return Variants::with_config(problem, [](auto config, SplitChoice) {
    using C = decltype(config);
    if (C::kShiftsK || C::kShiftsV) return static_cast<int>(FwdVariant::kLines);
    if (C::kOneCtaPerSM) return static_cast<int>(FwdVariant::kSmallSplit);
    if (C::kSplits) return static_cast<int>(FwdVariant::kSplit);
    return static_cast<int>(C::kTile.variant);
  });
}

// The call's FwdVariant.
extern "C" int variant(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                       int32_t heads, int32_t group, int32_t right, int32_t what) {
  static float sinks[1];
  FwdProblem problem = made(batch, queries, keys, heads, group, -1, right);
  if (what == 1) problem.sinks = {sinks, 2};
  if (what == 2) problem.modifiers.softcap = 5.f;
  return head_dim == 64 ? variant_of<64>(problem) : head_dim == 128 ? variant_of<128>(problem)
                                                                    : variant_of<256>(problem);
}

// The FwdVariant of a call without a mask: the distances of positions in k and in v, and of heads.
// `what`: the sum of 1 with packed keys, 2 with two query heads for each of k and v.
extern "C" int variant_of_rows(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                               int32_t stride_k, int32_t stride_v, int32_t head_stride,
                               int32_t what) {
  static int32_t const offsets[2] = {};
  FwdProblem problem = made(batch, queries, keys, what & 2 ? 16 : 8, what & 2 ? 2 : 1);
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.k = {nullptr, 0, stride_k, head_stride};
  problem.v = {nullptr, 0, stride_v, head_stride};
  if (what & 1) problem.keys.offsets = offsets;
  return head_dim > 96   ? variant_of<128>(problem)
         : head_dim > 80 ? variant_of<96>(problem)
         : head_dim > 64 ? variant_of<80>(problem)
                         : variant_of<64>(problem);
}

// Whether PackGQA of several queries per sequence pays.
extern "C" int packs(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys, int32_t heads,
                     int32_t group, int32_t left, int32_t right) {
  FwdProblem const call = made(batch, queries, keys, heads, group, left, right);
  return row_shift_of(call, head_dim == 64    ? VariantsOf<64>::kPackGqaTile
                            : head_dim == 128 ? VariantsOf<128>::kPackGqaTile
                                              : VariantsOf<256>::kPackGqaTile) > 0;
}

// Of tiles of 64 queries and 128 keys: parts of a group's heads, and of a head's query blocks.
extern "C" void key_tile_splits(int32_t batch, int32_t queries, int32_t keys, int32_t heads,
                                int32_t group, int32_t right, int32_t ctas_per_sm,
                                int32_t divides_queries, int32_t* found) {
  BwdProblem problem{};
  static_cast<Problem&>(problem) = made(batch, queries, keys, heads, group, -1, right);
  SplitCounts const counts =
      count_key_tile_splits(problem, 64, 128, ctas_per_sm, divides_queries != 0);
  found[0] = counts.heads;
  found[1] = counts.queries;
}

// Counts each tile, at row * tiles + position, that a CTA takes in the pairs or in the tail. Gives
// the number of rounds of pairs.
extern "C" int schedule(uint32_t rows, uint32_t tiles, uint32_t ctas_, int32_t* taken) {
  uint32_t const of_row = (tiles + 1) / 2, pairs = rows * of_row, ctas = std::min(pairs, ctas_);
  PairSchedule const made = PairSchedule::make(pairs, rows, tiles, ctas);
  gridDim.x = ctas;
  for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x) {
    for (uint32_t round = 0; round < made.rounds; ++round) {
      uint32_t const pair = round * ctas + blockIdx.x;
      if (pair >= pairs) continue;
      uint32_t const row = pair / of_row, first = pair % of_row, last = tiles - 1 - first;
      ++taken[row * tiles + first];
      if (last != first) ++taken[row * tiles + last];
    }
    for (uint32_t round = 0; PairSchedule::tail_tile(round) < made.tail.count; ++round) {
      PairTail::Part const part = made.tail.find(PairSchedule::tail_tile(round), tiles);
      uint32_t const position = part.number / part.width;
      ++taken[(part.row + part.number % part.width) * tiles + part.block + position];
    }
  }
  return made.rounds;
}

extern "C" uint32_t balanced_ctas(uint32_t rows, uint32_t tiles, uint32_t most) {
  return PairSchedule::balanced_ctas(rows * ((tiles + 1) / 2), rows, tiles, most);
}

constexpr int STORES = 100;

template <int kHeadDim>
int bwd_variant_of(const BwdProblem& problem) {
  using Variants = BwdVariants<Target<90, 232448>, dtype::bf16, kHeadDim, kHeadDim>;
  return Variants::with_config(problem, [&](auto config) {
    using C = decltype(config);
    return static_cast<int>(C::kVariant) + (stores_grad_q<C>(problem) ? STORES : 0);
  });
}

// The bits of the call's BwdVariant, and STORES where key tiles store dQ. `total`: of packed
// queries and keys, or 0. `what`: the sum of 1 with softcap, 2 with a bias, 4 deterministic.
extern "C" int bwd_variant(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                           int32_t right, int32_t total, int32_t what) {
  static int32_t const offsets[2] = {};
  BwdProblem problem{};
  static_cast<Problem&>(problem) = made(batch, queries, keys, 4, 1, -1, right);
  if (total > 0) problem.queries.offsets = problem.keys.offsets = offsets;
  problem.queries.total = problem.keys.total = total;
  problem.modifiers.softcap = what & 1 ? 5.f : 0.f;
  problem.modifiers.bias.data = what & 2 ? &problem : nullptr;
  problem.deterministic = what & 4;
  switch (head_dim) {
    case 64: return bwd_variant_of<64>(problem);
    case 96: return bwd_variant_of<96>(problem);
    case 128: return bwd_variant_of<128>(problem);
  }
  return bwd_variant_of<192>(problem);
}
"""
# Sums of the bits of BwdVariant.
_BWD = {
    **{"dense": 0, "varlen": 1, "modifiers": 2, "bias": 4},
    **{"no-dq": 8, "no-dq-modifiers": 8 + 2, "no-dq-bias": 8 + 4},
    **{"small": 16, "small-modifiers": 16 + 2, "small-bias": 16 + 4, "one-key-tile": 32},
}
_GENERAL, _MEDIUM, _SMALL, _SPLIT, _SMALL_SPLIT, _MODIFIERS, _SMALL_MODIFIERS = range(7)
_LINES, _WIDE = 7, 8


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("wgmma")
    program = _HEADERS + host_attention.PROBLEM + _FUNCTIONS
    return host_program.library(program, folder, {"sm90/pipeline.cuh": _PIPELINE})


@pytest.mark.parametrize(
    ("head_dim", "call", "expected"),
    [
        (64, (4, 16384, 16384, 32, 1, -1), _GENERAL),
        (64, (4, 4096, 4096, 32, 1, 0), _MEDIUM),
        (64, (64, 197, 197, 16, 1, -1), _WIDE),  # 59 rows beyond the last query instead of 187
        (64, (512, 49, 49, 8, 1, -1), _SMALL),
        (64, (64, 384, 384, 12, 1, 0), _SMALL),
        (128, (512, 49, 49, 8, 1, -1), _SMALL),
        (128, (64, 197, 197, 16, 1, -1), _WIDE),
        (64, (8, 4096, 77, 10, 1, -1), _WIDE),  # one step of 80 keys instead of two of 64
        (128, (32, 1024, 77, 8, 1, -1), _WIDE),
        (64, (64, 77, 77, 12, 1, 0), _WIDE),
        (64, (64, 100, 100, 12, 1, 0), _SMALL),  # under a mask steps of 64 hide less
        (64, (64, 64, 77, 12, 1, -1), _SMALL),  # one tile
        (64, (64, 128, 128, 12, 1, -1), _SMALL),
        (64, (64, 384, 384, 12, 1, -1), _SMALL),
        (64, (64, 512, 512, 12, 1, -1), _SMALL),
        (128, (64, 100, 100, 8, 1, -1), _SMALL),
        (64, (32, 257, 257, 16, 1, -1), _WIDE),  # one key in the last step of 64
        (64, (56, 577, 577, 12, 1, -1), _WIDE),
        (64, (8, 1500, 1500, 20, 1, -1), _GENERAL),
        (128, (8, 1024, 1024, 16, 1, 0), _MEDIUM),
        (128, (1, 512, 8192, 32, 4, -1), _MEDIUM),  # 128 tiles instead of 96
        (128, (2, 2000, 2000, 12, 1, -1), _GENERAL),
        (128, (1, 16384, 16384, 16, 1, -1), _GENERAL),
        (64, (1, 512, 50176, 8, 1, -1), _SPLIT),
        (64, (1, 65, 8192, 8, 1, -1), _SPLIT),
        (64, (1, 64, 8192, 8, 1, -1), _SMALL_SPLIT),
        (128, (1, 1, 8192, 32, 4, 0), _SMALL_SPLIT),
        (128, (1, 4, 8192, 32, 4, 0), _SMALL_SPLIT),
        (128, (1, 1, 512, 32, 4, -1), _SMALL_SPLIT),
        (128, (32, 1, 4096, 32, 4, -1), _SMALL),  # 256 tiles, two for each SM
        (256, (1, 1, 8192, 8, 8, -1), _SPLIT),
        (256, (2, 4096, 4096, 16, 2, 0), _GENERAL),
        (64, (1, 2048, 2048, 8, 1, 0), _SMALL),  # 256 tiles instead of 64
        (64, (4, 8192, 8192, 16, 1, 0), _MEDIUM),
        (64, (4, 1024, 1024, 16, 1, -1), _MEDIUM),  # two waves of larger tiles would be three
        (128, (1, 512, 512, 16, 1, 0), _SMALL),
        (128, (4, 3072, 3072, 16, 1, 0), _GENERAL),  # 16 tiles of 192 rows, none partly filled
        (128, (16, 128, 4096, 16, 1, -1), _MEDIUM),  # small tiles would load all keys twice
        (64, (16, 256, 4096, 16, 1, -1), _MEDIUM),
        (64, (16, 200, 8192, 12, 1, -1), _SPLIT),  # 128 rows: 3 waves of halves instead of 2
        (64, (4, 256, 8192, 16, 1, -1), _SPLIT),
        (
            64,
            (16, 200, 3001, 12, 1, -1),
            _SPLIT,
        ),  # test_attention_rows_inside_lines.py of tests/gpu
        (64, (4, 256, 5000, 16, 1, -1), _SPLIT),
        (64, (4, 129, 2000, 12, 1, 0), _SPLIT),
    ],
)
def test_the_forward_takes_the_tiles_that_waste_least(
    head_dim: int, call: tuple[int, ...], expected: int, library: ctypes.CDLL
) -> None:
    assert library.variant(head_dim, *call, 0) == expected


@pytest.mark.parametrize(
    ("call", "strides", "what", "expected"),
    [
        ((72, 33, 1, 1217), (576, 576, 72), 0, _LINES),
        ((96, 33, 64, 1217), (768, 768, 96), 0, _LINES),
        ((112, 33, 5, 1217), (896, 896, 112), 0, _LINES),
        ((104, 33, 5, 1217), (840, 832, 104), 0, _LINES),  # rows of v alone are moved
        ((104, 33, 5, 1217), (840, 840, 104), 0, _SMALL),
        ((120, 33, 5, 1217), (960, 960, 120), 0, _SMALL),  # one of 8 heads
        ((96, 33, 1, 1217), (1024, 1024, 128), 0, _SMALL),  # rows start at lines
        ((128, 33, 5, 1217), (1024, 1024, 128), 0, _SMALL),
        ((64, 33, 5, 1217), (512, 512, 64), 0, _SMALL),
        ((96, 33, 1, 1023), (768, 768, 96), 0, _SMALL),
        ((96, 20, 1, 1217), (768, 768, 96), 0, _SMALL),  # 28 of 160 tiles in a second round
        ((96, 33, 65, 1217), (768, 768, 96), 0, _MEDIUM),
        ((96, 2, 1, 2417), (768, 768, 96), 0, _SMALL_SPLIT),
        ((72, 33, 1, 4095), (576, 576, 72), 1, _SMALL),  # fewer keys may be in use
        ((72, 33, 1, 4096), (576, 576, 72), 1, _LINES),
        ((72, 33, 1, 1217), (576, 576, 72), 2, _LINES),  # PackGQA
        ((72, 33, 40, 1217), (576, 576, 72), 2, _SMALL),  # two tiles load the same keys
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


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("lengths", [(96, 77), (200, 77), (257, 257), (300, 65)], ids=str)
def test_steps_of_80_keys_are_of_known_lengths(
    head_dim: int, lengths: tuple[int, int], library: ctypes.CDLL
) -> None:
    """Those of test_attention_tiles.py of tests/gpu; not of packed sequences."""
    given = (head_dim, 48, *lengths, 8 * head_dim, 8 * head_dim, head_dim)
    assert library.variant_of_rows(*given, 0) == _WIDE
    assert library.variant_of_rows(*given, 1) != _WIDE


@pytest.mark.parametrize(("head_dim", "expected"), [(72, _GENERAL), (80, _SMALL)])
def test_small_tiles_load_rows_of_odd_multiples_of_16_bytes_slowly(
    head_dim: int, expected: int, library: ctypes.CDLL
) -> None:
    strides = (8 * head_dim, 8 * head_dim, head_dim)
    assert library.variant_of_rows(head_dim, 3, 4096, 300, *strides, 0) == expected


@pytest.mark.parametrize("head_dim", [72, 80, 88, 96, 104, 112])
def test_calls_that_test_moved_rows_move_them(head_dim: int, library: ctypes.CDLL) -> None:
    """Those of test_attention_rows_inside_lines.py of tests/gpu."""
    wide = -(-8 * head_dim // 64) * 64 + 64
    for queries, keys, what in ((1, 1217, 2), (5, 1217, 0), (64, 1217, 0), (2, 4200, 1)):
        sizes, strides = (33, queries, keys), (wide, wide, head_dim)
        assert library.variant_of_rows(head_dim, *sizes, *strides, what) == _LINES


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
        (64, (256, 4, 127, 32, 4), False),
    ],
)
def test_heads_are_packed_where_merging_takes_less_than_it_saves(
    head_dim: int, sizes: tuple[int, ...], packs: bool, library: ctypes.CDLL
) -> None:
    assert library.packs(head_dim, *sizes, -1, -1) == packs


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
    assert library.packs(head_dim, batch, queries, keys, heads, group, left, right)


def test_only_one_kernel_adds_the_sinks_of_packed_groups(library: ctypes.CDLL) -> None:
    packed, of_one_head = (256, 1, 200, 8, 4, -1), (256, 1, 200, 8, 1, -1)
    assert library.variant(128, *packed, 0) == _SMALL
    assert library.variant(128, *packed, 1) == _SMALL_SPLIT
    assert library.variant(128, *of_one_head, 1) == _SMALL


@pytest.mark.parametrize(
    ("head_dim", "length", "expected"),
    [
        (64, 49, _SMALL_MODIFIERS),
        (64, 128, _SMALL_MODIFIERS),
        (64, 1024, _MODIFIERS),
        (128, 64, _SMALL_MODIFIERS),
        (128, 2048, _MODIFIERS),
        (256, 64, _MODIFIERS),
    ],
)
def test_tiles_of_calls_with_modifiers(
    head_dim: int, length: int, expected: int, library: ctypes.CDLL
) -> None:
    assert library.variant(head_dim, 32, length, length, 8, 1, -1, 2) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((1, 8192, 8192, 8, 8, 0), 4),  # one kv head: 64 key tiles
        ((4, 2048, 2048, 32, 32, 0), 4),
        ((1, 2048, 2048, 8, 8, -1), 8),
        ((2, 700, 700, 6, 3, -1), 3),
        ((1, 8192, 8192, 32, 4, 0), 1),  # 512 tiles
        ((1, 8192, 8192, 8, 1, 0), 1),
        ((1, 64, 64, 2, 2, -1), 1),  # nothing to gain
        ((0, 64, 64, 2, 2, -1), 1),
    ],
)
def test_groups_are_divided_where_kv_heads_are_few(
    call: tuple[int, ...], expected: int, library: ctypes.CDLL
) -> None:
    assert key_tile_splits(library, call, 1, False) == (expected, 1)


@pytest.mark.parametrize(
    ("call", "ctas_per_sm", "expected"),
    [
        ((1, 4096, 77, 10, 1, -1), 1, (1, 13)),  # 10 key tiles of 64 steps: 5 steps a part
        ((2, 4096, 77, 10, 1, -1), 1, (1, 6)),
        ((2, 4096, 77, 10, 1, -1), 2, (1, 13)),
        ((6, 4096, 77, 10, 1, -1), 1, (1, 2)),
        ((7, 4096, 77, 10, 1, -1), 1, (1, 1)),  # 70 tiles: two parts of each would not run at once
        ((1, 256, 77, 10, 1, -1), 1, (1, 4)),  # as many parts as steps
        ((1, 192, 77, 10, 1, -1), 1, (1, 1)),  # two steps less are not worth it
        ((1, 384, 384, 10, 1, 0), 1, (1, 1)),  # nor, under a causal mask, three
        ((1, 512, 384, 10, 1, 0), 1, (1, 4)),
        ((1, 1024, 77, 16, 4, -1), 1, (4, 8)),  # the heads of the groups first
        ((1, 8192, 8192, 8, 8, 0), 1, (4, 1)),
        ((0, 4096, 77, 10, 1, -1), 1, (1, 1)),
        ((1, 2**30, 77, 1, 1, -1), 1, (1, 1)),  # a part's steps would not fit 31 bits
        ((1, 2**29, 77, 1, 1, -1), 1, (1, 132)),
    ],
)
def test_queries_are_divided_where_key_tiles_are_few(
    call: tuple[int, ...], ctas_per_sm: int, expected: tuple[int, int], library: ctypes.CDLL
) -> None:
    assert key_tile_splits(library, call, ctas_per_sm, True) == expected


def key_tile_splits(
    library: ctypes.CDLL, call: tuple[int, ...], ctas_per_sm: int, divides_queries: bool
) -> tuple[int, ...]:
    found = (ctypes.c_int32 * 2)()
    library.key_tile_splits(*call, ctas_per_sm, int(divides_queries), found)
    return tuple(found)


@pytest.mark.parametrize("ctas", [1, 4, 7, 132])
@pytest.mark.parametrize("tiles", [1, 2, 5, 8, 33])
@pytest.mark.parametrize("rows", [1, 3, 12, 40])
def test_every_tile_is_taken_once(rows: int, tiles: int, ctas: int, library: ctypes.CDLL) -> None:
    taken = (ctypes.c_int32 * (rows * tiles))()
    rounds = library.schedule(rows, tiles, ctas, taken)
    assert Counter(taken) == {1: rows * tiles}
    pairs = rows * ((tiles + 1) // 2)
    if pairs % min(ctas, pairs) == 0:
        assert rounds == pairs // min(ctas, pairs)


@pytest.mark.parametrize("tiles", [1, 3, 5, 7, 8, 11, 23])
def test_no_cta_has_only_tiles_without_a_partner(tiles: int, library: ctypes.CDLL) -> None:
    """A pair's work is that of tiles + 1 key blocks, the middle tile's that of half as many."""
    rows, pairs = 1000, (tiles + 1) // 2
    ctas = library.balanced_ctas(rows, tiles, 132)
    assert 130 <= ctas <= 132
    work = [0] * ctas
    for unit in range(rows * pairs):
        first = unit % pairs
        work[unit % ctas] += 1 if 2 * first + 1 == tiles else 2
    assert max(work) <= min(work) + 4


@pytest.mark.parametrize(
    ("rows", "tiles", "ctas"),
    [
        (88, 3, 132),  # 264 tiles, taken one by one: two for each CTA
        (154, 3, 132),
        (1000, 8, 132),  # all in pairs
        (20, 5, 60),  # one pair for each
        (400, 5, 131),
    ],
)
def test_all_sms_work_where_no_rounds_of_pairs_must_be_balanced(
    rows: int, tiles: int, ctas: int, library: ctypes.CDLL
) -> None:
    assert library.balanced_ctas(rows, tiles, 132) == ctas


_STORES = 100  # key tiles store dQ


@pytest.mark.parametrize(
    ("head_dim", "call", "expected"),
    [
        (64, (9, 49, 49, -1, 0, 0), _BWD["small"] + _STORES),
        (64, (17, 5000, 64, 0, 0, 0), _BWD["small"] + _STORES),
        (128, (9, 64, 64, -1, 0, 0), _BWD["small"] + _STORES),
        (128, (9, 64, 64, -1, 0, 4), _BWD["small"] + _STORES),
        (64, (9, 49, 49, -1, 0, 1), _BWD["small-modifiers"] + _STORES),
        (64, (9, 49, 49, -1, 0, 3), _BWD["small-bias"] + _STORES),
        (64, (9, 64, 64, -1, 200, 0), _BWD["small"] + _STORES),
        (192, (9, 49, 49, -1, 0, 0), _BWD["dense"]),
        # One tile of 128 keys.
        (64, (9, 77, 77, -1, 0, 0), _BWD["one-key-tile"] + _STORES),
        (128, (17, 4096, 128, 0, 0, 4), _BWD["one-key-tile"] + _STORES),
        (64, (9, 128, 128, -1, 0, 1), _BWD["modifiers"] + _STORES),
        (128, (9, 128, 128, -1, 0, 1), _BWD["modifiers"]),  # no registers
        (128, (9, 128, 128, -1, 0, 5), _BWD["no-dq-modifiers"]),
        (128, (9, 128, 128, -1, 0, 6), _BWD["bias"] + _STORES),
        # Few tiles with many steps, whose queries are divided.
        (64, (9, 5000, 64, -1, 0, 0), _BWD["small"] + _STORES),
        (128, (9, 4096, 128, 0, 0, 4), _BWD["one-key-tile"] + _STORES),
        (64, (9, 4096, 129, -1, 0, 0), _BWD["small"]),
        (64, (8, 4096, 256, -1, 0, 0), _BWD["varlen"]),
        (64, (9, 4096, 256, -1, 0, 0), _BWD["dense"]),
        (192, (16, 4096, 64, -1, 0, 0), _BWD["varlen"]),
        # Several.
        (64, (9, 129, 129, -1, 0, 4), _BWD["no-dq"]),
        (64, (9, 160, 160, -1, 0, 0), _BWD["small"]),  # 3 x 3 x 64 x 64 instead of 256 x 256
        (96, (9, 160, 160, -1, 0, 0), _BWD["small"]),
        (128, (9, 160, 160, -1, 0, 0), _BWD["dense"]),
        (64, (9, 256, 256, -1, 0, 0), _BWD["dense"]),
        (64, (9, 256, 256, 0, 0, 0), _BWD["small"]),  # 10 tiles of 16
        (64, (9, 512, 512, 0, 0, 0), _BWD["dense"]),
        (64, (8, 256, 256, -1, 2048, 0), _BWD["varlen"]),
        (64, (8, 256, 256, -1, 800, 0), _BWD["small"]),  # of 100 on average
        (64, (9, 2048, 2048, -1, 0, 2), _BWD["bias"]),
        (64, (9, 2048, 2048, 0, 0, 0), _BWD["dense"]),
    ],
)
def test_the_backward_takes_tiles_that_fit(
    head_dim: int, call: tuple[int, ...], expected: int, library: ctypes.CDLL
) -> None:
    assert library.bwd_variant(head_dim, *call) == expected
