"""Which tiles the forward of 9.0 takes for a call, and when heads are packed, on the host."""

from __future__ import annotations

import ctypes
from itertools import product

import host_attention
import host_program
import pytest

pytestmark = host_program.needs_compiler

_HEADERS = ("fwd_variants.h",)
_FUNCTIONS = """
template <int kHeadDim>
using VariantsOf = FwdVariants<Target<90, 232448>, dtype::bf16, kHeadDim, kHeadDim>;

template <int kHeadDim>
int variant_of(const FwdProblem& call) {
  using Variants = VariantsOf<kHeadDim>;
  FwdProblem const problem = Variants::simplified(call);
  return Variants::with_config(problem, [](auto config, auto splits) {
    using C = decltype(config);
    if constexpr (std::is_same_v<decltype(splits), FewSplits>) {
      return C::kBlockQ == 8 ? 9 : C::kBlockQ == 16 ? 10 : 11;
    } else {
      if (C::kShiftsK || C::kShiftsV) return static_cast<int>(FwdVariant::kLines);
      if (C::kOneCtaPerSM) return static_cast<int>(FwdVariant::kSmallSplit);
      if (C::kSplits) return static_cast<int>(FwdVariant::kSplit);
      return static_cast<int>(C::kTile.variant);
    }
  });
}

int variant_up_to(int32_t head_dim, const FwdProblem& call) {
  return head_dim > 96   ? variant_of<128>(call)
         : head_dim > 80 ? variant_of<96>(call)
         : head_dim > 64 ? variant_of<80>(call)
                         : variant_of<64>(call);
}

// The call's FwdVariant; 9, 10 and 11 stand for the kernel for 8, for 16 and for 32 rows.
extern "C" int variant(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                       int32_t heads, int32_t group, int32_t right, int32_t what) {
  static float sinks[1];
  FwdProblem problem = made(batch, queries, keys, heads, group, -1, right);
  static int32_t const offsets[2] = {};
  if (what == 1) problem.sinks = {sinks, 2};
  if (what == 2) problem.modifiers.softcap = 5.f;
  if (what == 3) problem.queries.offsets = offsets;
  return head_dim == 64 ? variant_of<64>(problem) : head_dim == 128 ? variant_of<128>(problem)
                                                                    : variant_of<256>(problem);
}

// A call without a mask: the distances of positions in k and in v, and of heads. `what`: the sum of
// 1 with packed keys, 2 with two query heads for each of k and v.
FwdProblem with_rows(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                     int32_t stride_k, int32_t stride_v, int32_t head_stride, int32_t what) {
  static int32_t const offsets[2] = {};
  FwdProblem problem = made(batch, queries, keys, what & 2 ? 16 : 8, what & 2 ? 2 : 1);
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.k = {nullptr, 0, stride_k, head_stride};
  problem.v = {nullptr, 0, stride_v, head_stride};
  if (what & 1) problem.keys.offsets = offsets;
  return problem;
}

// Its FwdVariant.
extern "C" int variant_of_rows(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys,
                               int32_t stride_k, int32_t stride_v, int32_t head_stride,
                               int32_t what) {
  return variant_up_to(head_dim, with_rows(head_dim, batch, queries, keys, stride_k, stride_v,
                                           head_stride, what));
}

// The bytes of its splits' results at head dims of 80 and less, with values of 8 columns: there
// splits save the most time.
extern "C" int64_t split_bytes_of_rows(int32_t head_dim, int32_t batch, int32_t queries,
                                       int32_t keys, int32_t stride_k, int32_t stride_v,
                                       int32_t head_stride, int32_t what) {
  using Variants = VariantsOf<80>;
  FwdProblem call =
      with_rows(head_dim, batch, queries, keys, stride_k, stride_v, head_stride, what);
  call.head_dim_v = 8;
  FwdProblem const problem = Variants::simplified(call);
  return Variants::with_config(problem, [&](auto, auto splits) {
    if constexpr (std::is_same_v<decltype(splits), FewSplits>) {
      return static_cast<int64_t>(splits.workspace(problem));
    } else {
      return static_cast<int64_t>(KeySplitsWorkspace(problem, splits).bytes);
    }
  });
}

// The FwdVariant of a call of 8 heads. Windows: negative where they have no bound. `what`: 1 with
// packed keys, 2 with sinks.
extern "C" int variant_of_dims(int32_t head_dim, int32_t head_dim_v, int32_t batch, int32_t queries,
                               int32_t keys, int32_t left, int32_t right, int32_t what) {
  static int32_t const offsets[2] = {};
  static float sinks[1];
  FwdProblem problem = made(batch, queries, keys, 8, 1, left, right);
  problem.head_dim = head_dim;
  problem.head_dim_v = head_dim_v;
  if (what == 1) problem.keys.offsets = offsets;
  if (what == 2) problem.sinks = {sinks, 2};
  return variant_up_to(std::max(head_dim, head_dim_v), problem);
}

// Whether heads are packed for several queries per sequence. `what`: 1 with softcap, 2 with varlen
// queries.
extern "C" int packs(int32_t head_dim, int32_t batch, int32_t queries, int32_t keys, int32_t heads,
                     int32_t group, int32_t left, int32_t right, int32_t what) {
  static int32_t const offsets[2] = {};
  FwdProblem call = made(batch, queries, keys, heads, group, left, right);
  if (what == 1) call.modifiers.softcap = 5.f;
  if (what == 2) call.queries.offsets = offsets;
  FwdProblem const problem = head_dim == 64    ? VariantsOf<64>::simplified(call)
                             : head_dim == 128 ? VariantsOf<128>::simplified(call)
                                               : VariantsOf<256>::simplified(call);
  return problem.splits.row_shift > 0;
}
"""
_GENERAL, _MEDIUM, _SMALL, _SPLIT, _SMALL_SPLIT, _MODIFIERS, _SMALL_MODIFIERS, _LINES, _WIDE = (
    range(9)
)
_ROWS_8, _ROWS_16, _ROWS_32 = 9, 10, 11


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = host_attention.library(tmp_path_factory.mktemp("forward"), _FUNCTIONS, *_HEADERS)
    found.split_bytes_of_rows.restype = ctypes.c_int64
    return found


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
        (128, (1, 9, 8192, 32, 4, 0), _SMALL_SPLIT),  # 36 rows of packed heads
        (128, (1, 17, 8192, 8, 1, 0), _SMALL_SPLIT),
        (128, (1, 17, 512, 8, 1, -1), _SMALL_SPLIT),
        (128, (32, 17, 4096, 8, 1, -1), _SMALL),  # 256 tiles, two for each SM
        (256, (1, 17, 8192, 8, 1, -1), _SPLIT),
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
    ("head_dim", "call", "expected"),
    [
        (64, (8, 1, 1000, 8, 1, -1), _ROWS_8),
        (64, (8, 8, 1000, 8, 1, 0), _ROWS_8),
        (64, (8, 9, 1000, 8, 1, 0), _ROWS_16),
        (64, (8, 16, 1000, 8, 1, -1), _ROWS_16),
        (64, (8, 17, 1000, 8, 1, -1), _SMALL),
        (128, (1, 1, 512, 32, 4, -1), _ROWS_8),
        (128, (1, 1, 8192, 32, 4, 0), _ROWS_8),  # 4 rows: the heads of a group
        (128, (1, 4, 8192, 32, 4, 0), _ROWS_16),
        (128, (32, 1, 4096, 32, 4, -1), _ROWS_8),
        (256, (1, 1, 8192, 8, 8, -1), _ROWS_8),
        (256, (1, 1, 8192, 16, 16, -1), _ROWS_16),
        # Not more tiles than three for each SM.
        (64, (99, 1, 4096, 4, 1, -1), _ROWS_8),
        (64, (397, 1, 4096, 1, 1, -1), _SMALL),
        (128, (49, 1, 4096, 32, 4, -1), _ROWS_8),
        (128, (50, 1, 4096, 32, 4, -1), _SMALL),
        # Any number of tiles whose results others would have to merge.
        (128, (256, 4, 4096, 32, 4, -1), _ROWS_16),
        (128, (256, 5, 4096, 32, 4, -1), _ROWS_32),
        (128, (256, 9, 4096, 32, 4, -1), _SMALL_SPLIT),
        (256, (256, 5, 4096, 32, 4, -1), _ROWS_32),
        # Above head dim 128 no others have small tiles.
        (256, (512, 1, 4096, 8, 1, -1), _ROWS_8),
        # More than 16 rows only of packed heads, and not more tiles than SMs.
        (256, (512, 17, 4096, 8, 1, -1), _GENERAL),
        (128, (132, 1, 200, 32, 32, -1), _ROWS_32),
        (128, (133, 1, 200, 32, 32, -1), _SMALL),
        (256, (133, 1, 200, 32, 32, -1), _GENERAL),
    ],
)
def test_few_rows_have_a_kernel(
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
        ((104, 33, 17, 1217), (840, 840, 104), 0, _SMALL),
        ((120, 33, 17, 1217), (960, 960, 120), 0, _SMALL),  # one of 8 heads
        ((96, 33, 17, 1217), (1024, 1024, 128), 0, _SMALL),  # rows start at lines
        ((128, 33, 17, 1217), (1024, 1024, 128), 0, _SMALL),
        ((64, 33, 17, 1217), (512, 512, 64), 0, _SMALL),
        ((96, 33, 17, 1023), (768, 768, 96), 0, _SMALL),
        ((96, 20, 17, 1217), (768, 768, 96), 0, _SMALL),  # 28 of 160 tiles in a second round
        ((96, 33, 65, 1217), (768, 768, 96), 0, _MEDIUM),
        ((96, 2, 17, 2417), (768, 768, 96), 0, _SMALL_SPLIT),
        ((72, 33, 17, 4095), (576, 576, 72), 1, _SMALL),  # fewer keys may be in use
        ((72, 33, 1, 4096), (576, 576, 72), 1, _LINES),
        ((72, 33, 1, 1217), (576, 576, 72), 2, _LINES),  # PackGQA
        # Few rows whose tiles do not move them.
        ((104, 33, 5, 1217), (840, 840, 104), 0, _ROWS_8),
        ((120, 33, 9, 1217), (960, 960, 120), 0, _ROWS_16),
        ((96, 33, 1, 1217), (1024, 1024, 128), 0, _ROWS_8),
        ((64, 33, 5, 1217), (512, 512, 64), 0, _ROWS_8),
        ((96, 33, 1, 1023), (768, 768, 96), 0, _ROWS_8),
        ((96, 20, 1, 1217), (768, 768, 96), 0, _ROWS_8),
        ((96, 50, 1, 1217), (768, 768, 96), 0, _SMALL),  # 400 tiles
        ((96, 2, 1, 2417), (768, 768, 96), 0, _ROWS_8),
        ((72, 33, 1, 4095), (576, 576, 72), 1, _ROWS_8),
        ((72, 33, 5, 1217), (576, 576, 72), 2, _ROWS_16),  # PackGQA, whose results are merged
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
    assert (_LINES in taken) == (keys >= (4096 if what else 1024)), taken


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

    assert variant(head_dim) == variant(other) == variant(head_dim, what=2) == _WIDE
    assert variant(head_dim, what=1) != _WIDE
    if lengths[1] <= 80:
        assert variant(head_dim, right=0) == _WIDE


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Rows of K or V that are an odd multiple of 16 bytes take longer in small tiles.
        ((80, 80, 48, 200, 100, -1, -1, 0), _SMALL),
        ((80, 72, 48, 200, 100, -1, -1, 0), _MEDIUM),
        ((80, 64, 8, 2048, 300, -1, -1, 0), _SMALL),
        ((72, 64, 8, 2048, 300, -1, -1, 0), _MEDIUM),
        ((72, 72, 3, 4096, 300, -1, -1, 0), _GENERAL),
        ((72, 72, 3, 17, 129, -1, -1, 0), _SMALL),  # not if one tile has all queries
        # All keys are visible, or steps of 80 hide more than those of 64.
        ((80, 80, 3, 257, 197, -1, -1, 0), _WIDE),
        ((80, 80, 3, 257, 197, 32, -1, 0), _SMALL),
        ((128, 128, 8, 128, 130, -1, -1, 0), _WIDE),
        ((128, 128, 8, 128, 130, -1, 0, 0), _SMALL),
        # A few keys in the last step of several; their number is known, and none is hidden.
        ((104, 104, 8, 300, 8, -1, -1, 0), _SMALL),
        ((96, 96, 48, 2048, 130, -1, -1, 0), _WIDE),
        ((96, 96, 48, 2048, 130, -1, -1, 1), _SMALL),
        ((128, 128, 16, 1024, 321, -1, -1, 0), _MEDIUM),
        ((128, 128, 16, 1024, 321, -1, 32, 0), _SMALL),
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
        ((1, 2, 32, 8, 4), _ROWS_8),
        ((9, 3, 70, 32, 2), _ROWS_8),  # 6 rows
        ((200, 2, 5000, 12, 3), _ROWS_8),  # 8, of which 6 exist
        ((34, 4, 32, 4, 4), _ROWS_16),  # 136 tiles of one head
        ((100, 2, 127, 64, 8), _ROWS_16),
        ((100, 3, 127, 64, 8), _ROWS_32),
        ((9, 2, 40, 16, 16), _ROWS_32),  # 144 tiles of one head
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
            assert library.variant(*call, -1, 3) in (_ROWS_8, _ROWS_16, _ROWS_32)


def test_a_few_tiles_of_varlen_queries_with_very_many_keys(library: ctypes.CDLL) -> None:
    """Which would need more splits than a cluster has."""
    varlen = 2
    for batch, keys, packs in ((1, 8192, True), (3, 8193, False), (4, 8193, True)):
        assert library.packs(128, batch, 4, keys, 8, 8, -1, -1, varlen) == packs
        assert library.packs(128, batch, 4, keys, 8, 8, -1, -1, 0)


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
    ("group", "expected"), [(4, _ROWS_8), (16, _ROWS_16), (32, _ROWS_32), (64, _SMALL_SPLIT)]
)
def test_two_kernels_add_the_sinks_of_packed_groups(
    group: int, expected: int, library: ctypes.CDLL
) -> None:
    packed, of_one_head = (512, 1, 200, group, group, -1), (512, 1, 200, group, 1, -1)
    assert library.variant(128, *packed, 0) == _SMALL
    assert library.variant(128, *packed, 1) == expected
    assert library.variant(128, *of_one_head, 1) == _SMALL


@pytest.mark.parametrize(
    ("head_dim", "length", "expected"),
    [
        (64, 8, _SMALL_MODIFIERS),
        (64, 49, _SMALL_MODIFIERS),
        (64, 128, _SMALL_MODIFIERS),
        (64, 1024, _MODIFIERS),
        (128, 64, _SMALL_MODIFIERS),
        (128, 2048, _MODIFIERS),
        (256, 8, _MODIFIERS),
        (256, 64, _MODIFIERS),
    ],
)
def test_tiles_of_calls_with_modifiers(
    head_dim: int, length: int, expected: int, library: ctypes.CDLL
) -> None:
    assert library.variant(head_dim, 32, length, length, 8, 1, -1, 2) == expected
