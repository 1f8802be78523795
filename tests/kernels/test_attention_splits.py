"""Few queries: split-KV, PackGQA and the kernel that merges splits, on the host."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import host_attention
import host_program
import pytest
import torch

pytestmark = host_program.needs_compiler

_HEADERS = """
#define __CUDACC__
#include <algorithm>
#include <cmath>
#include "device.h"
using std::max, std::min;
inline float __logf(float x) { return std::log(x); }
inline float __expf(float x) { return std::exp(x); }
#include "attention/fwd_merge.cuh"
#include "attention/key_splits.h"
#include "attention/pack_gqa.h"
#include "core/target.h"
#include "sm80/attention/key_tile_splits.h"
using namespace flashvar;
using namespace flashvar::attention;
"""
_FUNCTIONS = """
constexpr PackGqaTile kTile@TILE@;

// Of 128 queries and 128 keys a tile.
extern "C" int32_t splits(int64_t batch, int32_t queries, int32_t keys, int32_t heads,
                          int32_t window, int32_t causal, int32_t left_only,
                          int64_t blocks_per_sm) {
  FwdProblem problem = made(batch, queries, keys, heads, 1, window, window);
  if (causal) problem.window_right = 0;
  if (left_only) problem.window_right = kUnbounded;
  return SplitChoice::make(problem, 128, 128, blocks_per_sm).count;
}

// Likewise, of PackGQA's rows: 1 << row_shift for each query.
extern "C" int32_t splits_of_rows(int64_t batch, int32_t rows, int32_t keys, int32_t heads,
                                  int32_t row_shift) {
  FwdProblem problem = made(batch, rows, keys, heads, 1);
  problem.splits.row_shift = row_shift;
  problem.splits.group_rows = 1 << row_shift;
  return SplitChoice::make(problem, 128, 128, 1).count;
}

// Of the mma.sync backward.
extern "C" int32_t head_parts(int64_t blocks, int32_t group) {
  return sm80::attention::count_head_parts(blocks, group);
}
extern "C" int32_t query_parts(int64_t blocks, int64_t steps, int32_t causal,
                                int32_t blocks_per_sm) {
  return sm80::attention::count_query_parts(blocks, steps, causal != 0, blocks_per_sm);
}

// Where a call with PackGQA has query 0 of a head and its bias, and where keys begin, in elements;
// how many keys it has. -1: no PackGQA.
extern "C" int64_t pack_gqa_offset(int32_t head, int32_t keys, int32_t left, int32_t right,
                                 int what) {
  static uint16_t elements[1];
  FwdProblem problem = made(3, 1, keys, 6, 3, left, right);
  problem.q = problem.k = problem.out = {elements, 1000, 100, 10};
  problem.modifiers.bias = {nullptr, 500, 50, 5};
  if (what == 5) return needs_merge(simplified(problem, kTile));
  problem.sinks = {elements, 0};
  FwdProblem const found = simplified(problem, kTile);
  if (found.group != 1) return -1;
  int32_t const of_head = head / found.queries.seqlen, row = head % found.queries.seqlen;
  const BiasView& bias = found.modifiers.bias;
  switch (what) {
    case 0: return of_head * found.q.head_stride + row * found.q.seq_stride;
    case 1: return of_head * bias.head_stride + row * bias.query_stride;
    case 3: return found.k.data - elements;
    case 6: return needs_merge(found);
  }
  return found.keys.seqlen;
}

// KeySplits::row_shift of PackGQA of several queries per sequence; 0: no PackGQA.
extern "C" int32_t row_shift(int64_t batch, int32_t queries, int32_t keys, int32_t heads,
                             int32_t group, int softcap) {
  FwdProblem problem = made(batch, queries, keys, heads, group);
  problem.modifiers.softcap = static_cast<float>(softcap);
  FwdProblem const found = simplified(problem, kTile);
  if (found.splits.row_shift > 0 && found.heads_q != heads / group) return -1;
  return found.splits.row_shift;
}

// PackGQA of varlen queries, of at most `longest` in a sequence: where the queries of a sequence
// are in the batch dimension of q. -1: no PackGQA.
extern "C" int64_t pack_gqa_query(const int32_t* offsets, int32_t longest, int32_t total,
                                uint32_t batch, int softcap) {
  FwdProblem problem = made(3, longest, 90, 6, 3);
  problem.queries = {offsets, longest, total};
  problem.q = {nullptr, 0, 100, 10};
  problem.modifiers.softcap = static_cast<float>(softcap);
  FwdProblem const found = simplified(problem, kTile);
  if (found.group != 1) return -1;
  return found.batch_of_queries(batch) * found.q.batch_stride;
}

// Output and LSE: [batch, seqlen, heads, head_dim] and [batch, heads, seqlen], or varlen. `pad`:
// elements between rows of the output. `group_rows`: how many heads are the rows of a tile.
extern "C" int merge(uint16_t* out, float* lse, float* outs, float* lses, const float* sinks,
                     const int32_t* offsets, int32_t batch, int32_t seqlen, int32_t total,
                     int32_t heads, int32_t head_dim, int32_t count, int32_t pad,
                     int32_t group_rows) {
  FwdProblem problem{};
  problem.batch = batch;
  problem.queries = {offsets, seqlen, total};
  problem.heads_q = heads;
  problem.group = group_rows;
  problem.head_dim_v = head_dim;
  int64_t const row = heads * head_dim + pad;
  problem.out = {out, offsets == nullptr ? seqlen * row : 0, row, head_dim};
  problem.lse = lse;
  problem.sinks = {sinks, dtype::fp32::kAbi};
  KeySplits const splits{count, outs, lses, group_rows, group_rows > 1 ? offsets : nullptr};
  return launch_fwd_merge<Target<90, 232448>, dtype::bf16>(problem, splits, 0, {});
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    # The tile of the mma.sync kernels, in a header that takes nvcc.
    launcher = host_program.SOURCES / "sm80" / "attention" / "fwd_launch.cuh"
    tile = re.search(r"kPackGqaTile(\{.+?\})", launcher.read_text(encoding="utf-8"))
    assert tile is not None
    program = _HEADERS + host_attention.PROBLEM + _FUNCTIONS.replace("@TILE@", tile[1])
    made = host_program.library(program, tmp_path_factory.mktemp("splits"))
    made.pack_gqa_offset.restype = made.pack_gqa_query.restype = ctypes.c_int64
    return made


def splits(
    library: ctypes.CDLL,
    *sizes: int,
    window: int = -1,
    causal: bool = False,
    left_only: bool = False,
    blocks_per_sm: int = 1,
) -> int:
    batch, *rest = sizes
    options = (window, int(causal), int(left_only), ctypes.c_int64(blocks_per_sm))
    return int(library.splits(ctypes.c_int64(batch), *rest, *options))


def test_keys_are_split_where_tiles_are_few(library: ctypes.CDLL) -> None:
    assert splits(library, 1, 1, 8192, 1) > 20
    assert splits(library, 1, 1, 8192, 8) > splits(library, 8, 1, 8192, 8) > 1
    assert splits(library, 1, 512, 50176, 8) > 2
    # Many splits take long to merge: not one for each of the 128 key blocks.
    assert splits(library, 1, 1, 16384, 1) == 32
    # As many tiles as SMs, or few keys: one split.
    for enough in ((4, 1, 8192, 32), (1, 4096, 4096, 32), (1, 128, 128, 1), (0, 1, 8192, 8)):
        assert splits(library, *enough) == 1
    # Under a causal mask the tiles of a head have half of the work of its last one.
    assert splits(library, 1, 4096, 4096, 6, causal=True) == 1
    assert splits(library, 1, 16, 8192, 8, causal=True) > 2
    # Only what a window shows counts.
    assert splits(library, 1, 1, 8192, 8, window=64) == 1
    assert splits(library, 1, 1, 32768, 8, window=128, left_only=True) == 1
    assert splits(library, 1, 1, 32768, 8, window=16384, left_only=True) > 1


def test_blocks_that_share_an_sm_overlap(library: ctypes.CDLL) -> None:
    """Three blocks per SM, of which two run at a time, are worth no split."""
    for blocks_per_sm in (2, 3):
        assert splits(library, 2, 2000, 2000, 12, blocks_per_sm=blocks_per_sm) == 1
        # Enough splits that each SM has as many blocks as it can run.
        assert splits(library, 1, 512, 50176, 8, blocks_per_sm=blocks_per_sm) == 4 * blocks_per_sm
    assert splits(library, 16, 1, 4096, 1, blocks_per_sm=2) == 16


def test_heads_of_a_group_become_queries(library: ctypes.CDLL) -> None:
    """Sinks that differ between the rows of a tile are left to the second kernel."""
    for head in range(6):
        offsets = [library.pack_gqa_offset(head, 90, -1, -1, what) for what in (0, 1, 3, 4)]
        assert offsets == [10 * head, 50 * head, 0, 90]
    assert [library.pack_gqa_offset(0, 90, -1, -1, what) for what in (5, 6)] == [0, 1]
    # One query: its window ends at the last key, and begins `left` keys before.
    for right in (0, 7):
        assert library.pack_gqa_offset(0, 90, 20, right, 3) == 69 * 100
        assert library.pack_gqa_offset(0, 90, 20, right, 4) == 21
    assert (
        library.pack_gqa_offset(0, 90, 89, 0, 4) == library.pack_gqa_offset(0, 90, 400, 0, 4) == 90
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Sequences, queries, keys, heads, group, whether there is a modifier.
        ((1, 16, 4096, 32, 4, 0), 2),
        ((16, 4, 4000, 28, 7, 0), 3),
        ((256, 4, 64, 32, 4, 0), 2),
        ((1, 2, 8192, 64, 64, 0), 6),
        # The tiles of all heads run at the same time, and end before others would be merged.
        ((4, 32, 128, 32, 4, 0), 0),
        ((1, 8, 256, 14, 7, 0), 0),
        # More heads than a tile has rows, no groups, modifiers, few keys.
        ((1, 2, 8192, 65, 65, 0), 0),
        ((1, 16, 4096, 32, 1, 0), 0),
        ((1, 16, 4096, 32, 4, 1), 0),
        ((256, 4, 63, 32, 4, 0), 0),
        # The queries of a tile, or of most of it, leave no rows to other heads.
        ((1, 32, 4096, 32, 4, 0), 2),
        ((1, 32, 4096, 21, 7, 0), 0),
        ((1, 64, 4096, 32, 4, 0), 0),
        ((1, 2**31 - 1, 4096, 32, 4, 0), 0),
    ],
)
def test_pack_gqa_of_several_queries(
    call: tuple[int, ...], expected: int, library: ctypes.CDLL
) -> None:
    """Heads are packed where that halves the number of tiles and merging costs less."""
    assert library.row_shift(ctypes.c_int64(call[0]), *call[1:]) == expected


def test_packed_heads_are_split_sooner(library: ctypes.CDLL) -> None:
    """Their results are merged anyway; for others merging would cost more than splits save."""
    found = [library.splits_of_rows(ctypes.c_int64(8), 16, 640, 8, shift) for shift in (0, 2)]
    assert found == [1, 2]


def merged(
    outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64; splits are the third dimension: [batch, heads, splits, rows, ...]."""
    lse = lses.double().logsumexp(2)
    weights = (lses.double() - lse[:, :, None]).exp().nan_to_num(0.0)
    out = (weights[..., None] * outs.double()).sum(2)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.double().view(1, lse.shape[1], -1))  # of a head, or row
        out, lse = out * (lse - total).exp()[..., None], total
    return out, lse


def run_merge(
    library: ctypes.CDLL,
    outs: torch.Tensor,
    lses: torch.Tensor,
    sinks: torch.Tensor | None,
    shape: Sequence[int],
    pad: int = 0,
    offsets: Sequence[int] | None = None,
    group_rows: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of dense results of `shape`, [batch, rows, heads, dim]; with offsets, of varlen ones."""
    batch, rows, heads, dim = shape
    storage = torch.full((batch, rows, heads * dim + pad), 7.0, dtype=torch.bfloat16)
    out = storage[..., : heads * dim].unflatten(2, (heads, dim))
    lse = torch.full((batch, heads, rows), 7.0)
    starts = torch.tensor(offsets, dtype=torch.int32) if offsets is not None else None
    address = lambda x: ctypes.c_void_p(x.data_ptr()) if x is not None else None  # noqa: E731
    sequences = batch if offsets is None else len(offsets) - 1
    assert library.merge(
        *map(address, (out, lse, outs, lses, sinks, starts)),
        *(sequences, rows, rows if starts is not None else 0, heads, dim, outs.shape[2]),
        pad,
        group_rows,
    ) == 0  # fmt: skip
    return out, lse


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("count", "dim"), [(2, 128), (5, 64), (11, 200), (128, 8)])
def test_splits_are_merged(count: int, dim: int, with_sinks: bool, library: ctypes.CDLL) -> None:
    batch, rows, heads = 2, 5, 3
    outs = torch.randn(batch, heads, count, rows, dim)
    lses = torch.randn(batch, heads, count, rows) * 9
    lses[0, 1, 0] = lses[:, 2, :, 4] = -torch.inf  # a split, and a row, that see no key
    outs[lses == -torch.inf] = 0.0
    sinks = torch.tensor([0.5, -3.0, 12.0]) if with_sinks else None
    expected = merged(outs, lses, sinks)
    shape = (batch, rows, heads, dim)
    out, lse = run_merge(library, outs, lses, sinks, shape)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected[0], rtol=8e-3, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    again = run_merge(library, outs, lses, sinks, shape, pad=1)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


def of_groups(
    batch: int, heads: int, count: int, group: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits whose rows are a group's heads, sinks, and the expected [batch, heads, 1, ...]."""
    outs = torch.randn(batch, heads, count, group, dim)
    lses = torch.randn(batch, heads, count, group)
    sinks = torch.randn(heads * group) * 4
    found = merged(outs, lses, sinks.view(heads, group))
    out, lse = (x.flatten(1, 2).unsqueeze(2) for x in found)
    return outs, lses, sinks, out, lse


@pytest.mark.parametrize("count", [1, 4, 9])
def test_rows_of_a_tile_go_to_the_heads_of_the_call(count: int, library: ctypes.CDLL) -> None:
    batch, group, heads, dim = 2, 5, 3, 64
    outs, lses, sinks, expected, expected_lse = of_groups(batch, heads, count, group, dim)
    shape = (batch, 1, heads * group, dim)
    out, lse = run_merge(library, outs, lses, sinks, shape, pad=3, group_rows=group)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, rtol=8e-3, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 9])
def test_rows_of_a_tile_go_to_varlen_queries(count: int, library: ctypes.CDLL) -> None:
    """Sequences have one query or none; rows of no sequence get zeros and -inf."""
    offsets, group, heads, dim = [2, 3, 3, 4, 5], 4, 2, 64
    outs, lses, sinks, expected, expected_lse = of_groups(4, heads, count, group, dim)
    shape = (1, 7, heads * group, dim)
    out, lse = run_merge(library, outs, lses, sinks, shape, offsets=offsets, group_rows=group)
    ours = expected[[0, 2, 3], :, 0].transpose(0, 1), expected_lse[[0, 2, 3], :, 0].T
    found = out[0].transpose(0, 1)
    torch.testing.assert_close(found[:, 2:5].double(), ours[0], rtol=8e-3, atol=1e-4)
    torch.testing.assert_close(lse[0, :, 2:5].double(), ours[1], rtol=1e-5, atol=1e-5)
    assert (found[:, [0, 1, 5, 6]] == 0).all()
    assert (lse[0][:, [0, 1, 5, 6]] == -torch.inf).all()


def test_queries_beyond_the_given_maximum_are_nan(library: ctypes.CDLL) -> None:
    """Only the first query of a sequence has results where max_seqlen_q is said to be 1."""
    offsets, group, heads, dim = [0, 3, 4], 4, 2, 64
    outs, lses, sinks, expected, expected_lse = of_groups(2, heads, 1, group, dim)
    shape = (1, 4, heads * group, dim)
    out, lse = run_merge(library, outs, lses, sinks, shape, offsets=offsets, group_rows=group)
    found = out[0].transpose(0, 1)
    ours = expected[:, :, 0].transpose(0, 1), expected_lse[:, :, 0].T
    torch.testing.assert_close(found[:, [0, 3]].double(), ours[0], rtol=8e-3, atol=1e-4)
    torch.testing.assert_close(lse[0][:, [0, 3]].double(), ours[1], rtol=1e-5, atol=1e-5)
    assert found[:, 1:3].isnan().all()
    assert lse[0][:, 1:3].isnan().all()


def test_pack_gqa_of_varlen_queries(library: ctypes.CDLL) -> None:
    """A sequence has one query at most; only calls without modifiers have the second kernel."""
    offsets = (ctypes.c_int32 * 4)(0, 1, 1, 90)
    found = [library.pack_gqa_query(offsets, 1, 3, batch, 0) for batch in range(3)]
    assert found == [0, 100, 100]
    assert library.pack_gqa_query((ctypes.c_int32 * 4)(-5, 1, 90, 90), 1, 3, 0, 0) == 0
    assert library.pack_gqa_query((ctypes.c_int32 * 4)(0, 1, 90, 90), 1, 3, 2, 0) == 200
    for others in ((2, 3, 0, 0), (1, 0, 0, 0), (1, 3, 0, 5)):
        assert library.pack_gqa_query(offsets, *others) == -1


@pytest.mark.parametrize("count", [3, 9])
def test_varlen_rows_are_merged_where_they_are(count: int, library: ctypes.CDLL) -> None:
    """Rows outside all sequences stay as they are."""
    total, heads, dim = 30, 2, 64
    outs, lses = torch.randn(1, heads, count, total, dim), torch.randn(1, heads, count, total)
    expected = merged(outs, lses, None)
    offsets = [2, 9, 9, 26]
    shape = (1, total, heads, dim)
    out, lse = run_merge(library, outs, lses, None, shape, offsets=offsets)
    inside = torch.arange(total).ge(2) & torch.arange(total).lt(26)
    found = out[0].transpose(0, 1)
    torch.testing.assert_close(
        found[:, inside].double(), expected[0][0][:, inside], rtol=8e-3, atol=1e-4
    )
    torch.testing.assert_close(
        lse[0][:, inside].double(), expected[1][0][:, inside], rtol=1e-5, atol=1e-5
    )
    assert (found[:, ~inside] == 7).all()
    assert (lse[0][:, ~inside] == 7).all()


@pytest.mark.parametrize(
    ("blocks", "group", "expected"),
    [(1, 8, 8), (64, 8, 8), (352, 8, 4), (353, 6, 3), (528, 8, 2), (1056, 8, 1), (5000, 8, 1)],
)
def test_heads_of_a_group_are_divided_where_key_tiles_are_few(
    blocks: int, group: int, expected: int, library: ctypes.CDLL
) -> None:
    assert library.head_parts(ctypes.c_int64(blocks), group) == expected


@pytest.mark.parametrize(
    ("blocks", "steps", "causal", "blocks_per_sm", "expected"),
    [
        (10, 64, False, 1, 13),  # 5 steps instead of 64
        (10, 64, False, 2, 22),
        (66, 64, False, 1, 2),
        (67, 64, False, 2, 1),  # two parts of each would share SMs
        (10, 5, False, 1, 5),
        (10, 4, False, 1, 1),  # nothing is gained
        (1, 0, False, 1, 1),
        # A causal mask: also for balance.
        (64, 16, True, 1, 6),
        (64, 8, True, 1, 4),  # two steps at least
        (256, 64, True, 1, 4),
        (512, 64, True, 1, 2),
        (529, 64, True, 1, 1),
        (5000, 64, True, 1, 1),
        (64, 1, True, 1, 1),
    ],
)
def test_queries_are_divided_where_key_tiles_are_few(
    blocks: int,
    steps: int,
    causal: bool,
    blocks_per_sm: int,
    expected: int,
    library: ctypes.CDLL,
) -> None:
    found = library.query_parts(
        ctypes.c_int64(blocks), ctypes.c_int64(steps), int(causal), blocks_per_sm
    )
    assert found == expected
