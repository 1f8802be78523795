"""How many splits the forward for few rows takes, and how its blocks share SMs, on the host."""

from __future__ import annotations

import ctypes
from itertools import product
from typing import NamedTuple

import host_attention
import host_program
import pytest

pytestmark = host_program.needs_compiler

_FUNCTIONS = """
template <int kHeadDim, int kRows = 8>
using Few = FewConfig<Target<90, 232448>, dtype::bf16, kHeadDim, kHeadDim, kRows>;

template <class Config>
void choose(const FwdProblem& problem, int64_t* found) {
  FewSplits const splits = FewSplits::choose<Config>(problem);
  found[0] = splits.count;
  found[1] = splits.in_cluster;
  found[2] = splits.has_merge();
  found[3] = static_cast<int64_t>(splits.workspace(problem));
}

template <int kHeadDim>
void choose_for(const FwdProblem& problem, int64_t* found) {
  int32_t const rows = problem.queries.seqlen;
  rows <= 8    ? choose<Few<kHeadDim>>(problem, found)
  : rows <= 16 ? choose<Few<kHeadDim, 16>>(problem, found)
               : choose<Few<kHeadDim, 32>>(problem, found);
}

// Writes the number of splits, whether they are a cluster, whether there is a merge, and the bytes
// of the workspace. `varlen`: of several varlen queries after PackGQA.
extern "C" void splits(int32_t head_dim, int32_t batch, int32_t rows, int32_t keys, int32_t heads,
                       int32_t left, int32_t varlen, int64_t* found) {
  static int32_t const offsets[2] = {};
  FwdProblem problem = made(batch, rows, keys, heads, 1, left);
  if (varlen != 0) {
    problem.queries.offsets = offsets;
    problem.splits.row_shift = 1;
  }
  problem.head_dim = problem.head_dim_v = head_dim;
  head_dim <= 64    ? choose_for<64>(problem, found)
  : head_dim == 128 ? choose_for<128>(problem, found)
                    : choose_for<256>(problem, found);
}

template <class Config>
void share(int64_t blocks, int32_t multiprocessors, int64_t* found) {
  FewSharing const sharing = FewSharing::choose<Config>(blocks, multiprocessors);
  found[0] = sharing.blocks_per_sm;
  found[1] = sharing.stages;
  found[2] = Config::kStageBytes;
  found[3] = Config::shared_memory(sharing.stages);
  found[4] = Config::kBlocksPerSM;
}

// Writes the blocks of an SM, their stages, the bytes of a stage and those of a block, and the most
// blocks of an SM.
extern "C" void sharing(int32_t head_dim, int32_t rows, int64_t blocks, int32_t multiprocessors,
                        int64_t* found) {
  bool const few = rows <= 8;
  head_dim <= 64    ? few ? share<Few<64>>(blocks, multiprocessors, found)
                          : share<Few<64, 16>>(blocks, multiprocessors, found)
  : head_dim == 128 ? few ? share<Few<128>>(blocks, multiprocessors, found)
                          : share<Few<128, 16>>(blocks, multiprocessors, found)
  : few             ? share<Few<256>>(blocks, multiprocessors, found)
                    : share<Few<256, 16>>(blocks, multiprocessors, found);
}
"""
_SMS = 132
# And the keys of a step. Rows of 8 elements are computed like those of 64, but have fewer bytes.
_HEAD_DIMS = {8: 128, 64: 128, 128: 128, 256: 64}


class Splits(NamedTuple):
    number: int
    in_cluster: bool
    has_merge: bool
    workspace: int


class Sharing(NamedTuple):
    blocks_per_sm: int
    stages: int
    stage_bytes: int
    block_bytes: int
    most_per_sm: int


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("few_splits")
    return host_attention.library(folder, _FUNCTIONS, "fwd_variants.h")


def splits(
    library: ctypes.CDLL,
    head_dim: int,
    batch: int,
    keys: int,
    heads: int,
    rows: int = 4,
    left: int = -1,
    varlen: bool = False,
) -> Splits:
    found = (ctypes.c_int64 * 4)()
    library.splits(head_dim, batch, rows, keys, heads, left, varlen, found)
    count, in_cluster, has_merge, workspace = found
    return Splits(count, bool(in_cluster), bool(has_merge), workspace)


def sharing(
    library: ctypes.CDLL, head_dim: int, rows: int, blocks: int, multiprocessors: int
) -> Sharing:
    found = (ctypes.c_int64 * 5)()
    library.sharing(head_dim, rows, ctypes.c_int64(blocks), multiprocessors, found)
    return Sharing(*found)


@pytest.mark.parametrize("left", [-1, 0, 300], ids=lambda left: f"left {left}")
@pytest.mark.parametrize("rows", [4, 12, 24], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_every_split_has_work(head_dim: int, rows: int, left: int, library: ctypes.CDLL) -> None:
    """And splits are a cluster, or merged by a second kernel, whatever the sizes of the call."""
    step = _HEAD_DIMS[head_dim] if rows <= 16 else 64
    for batch, keys, heads in product(
        (0, 1, 2, 7, 13, 33, 51, 67, 133, 265, 2000),
        (0, 1, 64, 65, 129, 500, 1217, 4096, 8192, 65537, 200000),
        (1, 3, 8),
    ):
        found = splits(library, head_dim, batch, keys, heads, rows, left)
        given = f"{batch} sequences, {heads} heads, {keys} keys: {found}"
        visible = keys if left < 0 else min(keys, left + rows)
        steps, tiles, count = -(-visible // step), max(batch * heads, 1), found.number
        if count == 1:
            assert not found.in_cluster, given
        else:
            longest = -(-steps // count)
            assert (count - 1) * longest < steps, given
            # All of them run at a time, two on an SM, unless there are many tiles.
            assert (2 <= count <= 128 and tiles * count <= 2 * _SMS) or 2 <= count <= 6, given
            few = count <= 8 and tiles * count <= 100
            assert found.in_cluster == few, given
        assert found.has_merge == (count > 1 and not found.in_cluster), given
        results = batch * heads * rows * count if found.has_merge else 0
        assert found.workspace == results * (head_dim + 1) * 4, given


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Head dim, sequences, keys, heads.
        ((128, 1, 128, 8), (1, False)),  # one step
        ((128, 1, 512, 8), (4, True)),  # a step for each split
        ((128, 1, 1024, 8), (8, True)),
        ((128, 1, 4096, 1), (32, False)),
        ((128, 1, 16384, 1), (32, False)),  # 4 steps of 128 for each split
        ((256, 1, 4096, 1), (32, False)),  # 2 steps of 64
        ((128, 1, 8192, 8), (5, True)),  # 40 blocks load as fast as memory allows
        ((128, 1, 131072, 8), (5, True)),
        ((64, 1, 8192, 8), (8, True)),
        ((8, 1, 200000, 3), (87, False)),  # 88 would also have 18 steps at most
        ((64, 4, 8192, 8), (2, True)),
        ((128, 4, 8192, 8), (2, True)),
        ((128, 16, 8192, 8), (1, False)),  # 128 tiles
        ((128, 400, 8192, 8), (1, False)),
    ],
    ids=str,
)
def test_choices(
    call: tuple[int, int, int, int], expected: tuple[int, bool], library: ctypes.CDLL
) -> None:
    assert splits(library, *call)[:2] == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((128, 2, 10006, 4), (8, True)),
        ((128, 4, 2243, 8), (3, True)),
        ((128, 8, 15142, 8), (2, False)),
        ((64, 1, 30000, 8), (14, False)),
        ((128, 16, 8000, 8), (1, False)),
    ],
    ids=str,
)
def test_choices_with_32_rows(
    call: tuple[int, int, int, int], expected: tuple[int, bool], library: ctypes.CDLL
) -> None:
    """A step takes longer: two warps read the same keys."""
    assert splits(library, *call, rows=32)[:2] == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Computing takes longer than loading, and SMs have one or two blocks.
        ((64, 13, 20000, 8), 2),
        ((64, 17, 8192, 8), 2),
        ((64, 20, 20000, 8), 2),
        ((64, 24, 20000, 8), 1),  # loading takes longer
        ((128, 13, 20000, 8), 1),
        ((64, 13, 2048, 8), 1),  # a merge takes longer than what splits save
        # Two blocks run on an SM: 24 tiles are left for a second wave.
        ((128, 36, 8192, 8), 3),
        ((128, 36, 2048, 8), 3),
        ((64, 25, 12998, 16), 5),  # of three: 4 are left
        ((64, 40, 1375, 10), 1),  # too few keys for it
        ((128, 33, 8192, 8), 1),  # none is left
        ((128, 48, 8192, 8), 1),  # 120 are left
    ],
    ids=str,
)
def test_choices_of_many_tiles_with_32_rows(
    call: tuple[int, int, int, int], expected: int, library: ctypes.CDLL
) -> None:
    assert splits(library, *call, rows=32)[:2] == (expected, False)


def test_splits_of_several_varlen_queries_are_a_cluster(library: ctypes.CDLL) -> None:
    """A second kernel would not find the rows of packed heads."""
    for batch, keys in product((1, 2, 7, 13, 51, 133), (64, 500, 8192, 200000)):
        found = splits(library, 128, batch, keys, 1, varlen=True)
        assert found.in_cluster == (found.number > 1), (batch, keys)
        assert not found.has_merge, (batch, keys)
        assert found.workspace == 0, (batch, keys)
    assert splits(library, 128, 1, 8192, 1, varlen=True).number == 8


def test_a_second_kernel_costs_more_than_a_cluster(library: ctypes.CDLL) -> None:
    assert splits(library, 8, 50, 768, 1)[:2] == (2, True)
    assert splits(library, 8, 51, 768, 1)[:2] == (1, False)


def test_only_keys_in_the_window_are_split(library: ctypes.CDLL) -> None:
    assert splits(library, 128, 1, 8192, 8).number > 1
    assert splits(library, 128, 1, 8192, 8, left=100).number == 1
    assert splits(library, 128, 1, 8192, 8, left=508) == splits(library, 128, 1, 512, 8)


@pytest.mark.parametrize("multiprocessors", [78, _SMS])
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("head_dim", _HEAD_DIMS)
def test_stages_that_fit_the_sm(
    head_dim: int, rows: int, multiprocessors: int, library: ctypes.CDLL
) -> None:
    """As many as keep memory busy, and two at least where no other block computes meanwhile."""
    in_flight, shared_memory = 10 << 20, 228 << 10
    for blocks in range(1000):
        found = sharing(library, head_dim, rows, blocks, multiprocessors)
        given = f"{blocks} blocks: {found}"
        wanted = max(-(-blocks // multiprocessors), 1)
        assert found.blocks_per_sm == min(wanted, found.most_per_sm), given
        running = max(min(blocks, found.blocks_per_sm * multiprocessors), 1)
        fewest = 2 if found.blocks_per_sm == 1 else 1
        assert fewest <= found.stages <= 3, given
        loads = running * found.stage_bytes
        assert found.stages == fewest or loads * found.stages <= in_flight, given
        assert found.blocks_per_sm * (found.block_bytes + 1024) <= shared_memory, given
        one_more = found.blocks_per_sm * (found.block_bytes + found.stage_bytes + 1024)
        assert (
            found.stages == 3 or loads * (found.stages + 1) > in_flight or one_more > shared_memory
        ), given
