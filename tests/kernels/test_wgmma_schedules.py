"""Which tiles the backward of 9.0 takes, and which ones a schedule has, on the host."""

from __future__ import annotations

import ctypes
from collections import Counter

import host_attention
import host_program
import pytest

pytestmark = host_program.needs_compiler

_HEADERS = (
    "bwd_variants.h",
    "key_tile_splits.h",
    "pair_schedule.cuh",
)
_FUNCTIONS = """
// Of tiles of 64 queries and 128 keys: parts of a group's heads, and of a head's query blocks.
extern "C" void key_tile_splits(int32_t batch, int32_t queries, int32_t keys, int32_t heads,
                                int32_t group, int32_t right, int32_t left, int32_t head_dim,
                                int32_t ctas_per_sm, int32_t divides_queries, int32_t* found) {
  BwdProblem problem{};
  static_cast<Problem&>(problem) = made(batch, queries, keys, heads, group, left, right);
  problem.head_dim = problem.head_dim_v = head_dim;
  SplitCounts const counts =
      KeyTileChoice::make(problem, 64, 128, ctas_per_sm, divides_queries != 0).counts;
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
  problem.head_dim = problem.head_dim_v = head_dim;
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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_attention.library(tmp_path_factory.mktemp("wgmma"), _FUNCTIONS, *_HEADERS)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((1, 8192, 8192, 8, 8, 0), 4),  # one kv head: 64 key tiles
        ((4, 2048, 2048, 32, 32, 0), 4),
        ((1, 2048, 2048, 8, 8, -1), 8),
        ((2, 700, 700, 6, 3, -1), 3),
        ((1, 8192, 8192, 32, 4, 0), 1),  # 512 tiles
        ((1, 8192, 8192, 8, 1, 0), 1),
        ((1, 8192, 8192, 8, 8, 0, 127), 2),  # with a window tiles have equal work: whole rounds
        ((2, 8192, 8192, 8, 8, 0), 2),
        ((2, 8192, 8192, 8, 8, 0, 127), 1),
        ((2, 300, 1000, 8, 8, -1, -1, 128), 8),
        ((2, 300, 1000, 8, 8, -1, -1, 256), 4),  # parts cost what their bytes cost
        ((1, 65536, 65536, 32, 32, -1, -1, 128), 1),  # 1 % for 2 GB
        ((1, 4096, 400 * 128, 8, 8, -1), 4),
        ((1, 4096, 529 * 128, 8, 8, -1), 1),  # rounds enough
        ((1, 64, 64, 2, 2, -1), 1),  # adding takes as long as a step
        ((1, 64, 64, 28, 7, -1), 7),  # seven steps, one after the other
        ((16, 64, 64, 28, 7, -1), 1),  # 64 tiles
        ((0, 64, 64, 2, 2, -1), 1),
        ((1, 0, 64, 8, 8, -1), 1),
        ((1, 64, 0, 8, 8, -1), 1),
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
        ((1, 192, 77, 10, 1, -1), 1, (1, 3)),
        ((1, 128, 77, 10, 1, -1), 1, (1, 1)),  # one step less is not worth it
        ((1, 384, 384, 10, 1, 0), 1, (1, 3)),
        ((1, 256, 256, 10, 1, 0), 1, (1, 1)),  # nor, under a causal mask, three
        ((1, 512, 384, 10, 1, 0), 1, (1, 4)),
        ((1, 1024, 77, 16, 4, -1), 1, (4, 8)),  # of equal times, that of more parts of the group
        ((1, 2000, 77, 8, 8, 0), 1, (2, 32)),
        ((1, 8192, 8192, 8, 8, 0), 1, (4, 1)),
        ((0, 4096, 77, 10, 1, -1), 1, (1, 1)),
        ((1, 0, 77, 10, 1, -1), 1, (1, 1)),
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
    """`call` ends with the left window and the head dim, unless they are -1 and 64."""
    found = (ctypes.c_int32 * 2)()
    call = (*call, *(-1, 64)[len(call) - 6 :])
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
        (96, (9, 160, 160, -1, 0, 0), _BWD["dense"]),  # as many steps one after the other
        (96, (33, 513, 513, -1, 0, 0), _BWD["dense"]),
        (96, (40, 513, 513, -1, 0, 0), _BWD["small"]),  # five rounds of 9, not three of 17
        (96, (40, 160, 160, -1, 0, 0), _BWD["small"]),  # test_many_sequences of tests/gpu
        (128, (9, 160, 160, -1, 0, 0), _BWD["dense"]),
        (64, (44, 384, 384, -1, 0, 0), _BWD["dense"]),
        (64, (9, 256, 256, 0, 0, 0), _BWD["dense"]),  # two steps, not four
        (64, (60, 256, 256, 0, 0, 0), _BWD["small"]),  # 10 tiles of 16
        (64, (9, 512, 512, 0, 0, 0), _BWD["dense"]),
        (64, (44, 384, 384, -1, 44 * 384, 0), _BWD["varlen"]),
        (64, (8, 256, 256, -1, 800, 0), _BWD["small"]),  # of 100 on average
        (96, (8, 512, 512, -1, 1600, 0), _BWD["small"]),
        (96, (8, 512, 512, -1, 2400, 0), _BWD["varlen"]),
        (64, (9, 2048, 2048, -1, 0, 2), _BWD["bias"]),
        (64, (9, 2048, 2048, 0, 0, 0), _BWD["dense"]),
    ],
)
def test_the_backward_takes_tiles_that_fit(
    head_dim: int, call: tuple[int, ...], expected: int, library: ctypes.CDLL
) -> None:
    assert library.bwd_variant(head_dim, *call) == expected
