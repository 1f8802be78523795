"""Into how many segments a compiled gated_delta_rule divides sequences: by the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import host_program
import pytest

# Takes whether the first segment is gone through once, whether sequences are packed, and how many.
SEGMENTS = """
#include <cstdio>
#include <cstdlib>
#include "gated_delta_rule/segments.h"

int main(int, char** given) {
  using namespace flashvar::gated_delta_rule;
  // Of 4 multiprocessors: a chunk takes 10 or 15, a boundary 1.
  ChainCosts const costs{4, 10, 15, 10, 1, 0, std::atoi(given[1]) != 0};
  static int const offsets = 0;
  Problem problem{};
  problem.sequences = std::atoi(given[3]);
  problem.heads = problem.heads_qk = problem.group = 1;
  problem.head_dim = problem.head_dim_v = 128;
  problem.rows = {std::atoi(given[2]) ? &offsets : nullptr, 96 * kChunk, 96 * kChunk};
  for (int count = 1; count <= 4; ++count) {
    std::printf("%d ", static_cast<int>(chain_cost(problem, costs, 1, 96, count)));
  }
  Segments const segments = choose_segments(problem, costs);
  std::printf("%d %d", segments.rows, static_cast<int>(segments.boundaries(problem)));
}
"""

# Takes the number of heads. Prints the chains' costs with 1 to 4 segments, and into how many rows
# they are divided.
GRAD_SEGMENTS = """
#include <cstdio>
#include <cstdlib>
#include "gated_delta_rule/grad_segments.h"

int main(int, char** given) {
  using namespace flashvar::gated_delta_rule;
  // Of 8 multiprocessors: a chunk takes 10, or 16 of two blocks; of segments 10 with results, or 12
  // of 128 columns without; a boundary 1.
  GradChainCosts const costs{8, {10, 16}, 10, 12, 1, 0};
  Problem problem{};
  problem.sequences = problem.heads_qk = problem.group = 1;
  problem.heads = std::atoi(given[1]);
  problem.head_dim = problem.head_dim_v = 128;
  problem.rows = {nullptr, 96 * kChunk, 0};
  for (int count = 1; count <= 4; ++count) {
    std::printf("%d ", static_cast<int>(chain_cost(problem, costs, 1, 96, count)));
  }
  Segments const segments = choose_segments(problem, costs);
  GradSegments const parts(problem, segments, 128, nullptr);
  std::printf("%d %u %d", segments.rows, parts.boundaries, static_cast<int>(parts.bytes >> 16));
}
"""

# What of the headers is of the device.
DEVICE = """#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>
#include "device.h"
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
#define __CUDACC__
#include "gated_delta_rule/segment_scan.cuh"
using namespace flashvar::gated_delta_rule;
"""

# Runs scans; prints their largest errors, or 1 where something else is read or written.
SCAN = """
constexpr int kDim = 64, kK = 40, kV = 24, kHeads = 2, kRows = kChunk;
constexpr int kLengths[] = {0, 400, 1, 64, 0, 70, 200, 700, 3};
constexpr int kSequences = sizeof(kLengths) / sizeof(int);

template <class Config, bool kReverse>
void scan(const ScanArgs& args) {
  __shared__ ScanState<Config> state;
  __shared__ ScanSums<Config> sums;
  auto const work = SegmentWork::ending_at_boundary(args.problem, args.segments, args.column_tiles,
                                                 Config::kColumns);
  scan_boundaries<Config>(args, work, kReverse, state, sums);
}

template <class Config, bool kReverse>
double error_of() {
  std::mt19937 bits(0);
  auto const drawn = [&] { return std::normal_distribution<float>()(bits) / 4; };
  int offsets[kSequences + 1] = {0};
  for (int i = 0; i < kSequences; ++i) offsets[i + 1] = offsets[i] + kLengths[i];
  int const total = offsets[kSequences];
  FwdProblem problem{};
  problem.sequences = kSequences;
  problem.heads = problem.heads_qk = kHeads;
  problem.group = 1;
  problem.head_dim = kK;
  problem.head_dim_v = kV;
  problem.rows = {offsets, total, total};
  Segments const segments{kRows};
  std::vector<float> memory(
      SegmentStates(problem, segments, kDim, nullptr).bytes / sizeof(float),
      std::numeric_limits<float>::quiet_NaN());  // what pass 1 does not write is not read
  SegmentStates const between(problem, segments, kDim, memory.data());
  auto const at = [](const State& of, int boundary, int head, int v, int k) -> float& {
    return of.data[boundary * of.sequence_stride + head * of.head_stride + v * of.v_stride + k];
  };
  for (int i = 0; i < kSequences; ++i) {
    for (int n = 0; n < (kLengths[i] - 1) / kRows; ++n) {
      int const boundary = offsets[i] / kRows + n;
      for (int head = 0; head < kHeads; ++head) {
        for (int k = 0; k < kDim; ++k) {
          for (int v = 0; v < kV; ++v) {
            at(between.states, boundary, head, v, k) = k < kK ? drawn() : 0;
          }
          for (int c = 0; n > 0 && c < kK; ++c) {  // its columns, or its rows where transposed
            if (kReverse && k >= kK) continue;
            float const one = k < kK ? drawn() : 0;
            at(between.transitions, boundary, head, kReverse ? k : c, kReverse ? c : k) = one;
          }
        }
      }
    }
  }
  std::vector<float> expected = memory;
  State const states{expected.data(), between.states.sequence_stride, between.states.head_stride,
                     1, kDim};
  for (int i = 0; i < kSequences; ++i) {
    int const count = (kLengths[i] - 1) / kRows, first = offsets[i] / kRows;
    for (int n = 1; n < count; ++n) {
      int const to = first + (kReverse ? count - 1 - n : n);
      int const from = to + (kReverse ? 1 : -1), segment = kReverse ? from : to;
      for (int head = 0; head < kHeads; ++head) {
        for (int v = 0; v < kV; ++v) {
          for (int k = 0; k < kK; ++k) {
            double sum = at(states, to, head, v, k);
            for (int c = 0; c < kK; ++c) {
              sum += double{at(between.transitions, segment, head, c, k)} *
                     at(states, from, head, v, c);
            }
            at(states, to, head, v, k) = static_cast<float>(sum);
          }
        }
      }
    }
  }
  int const tiles = (kV + Config::kColumns - 1) / Config::kColumns;
  ScanArgs const args{problem, segments, between, tiles};
  run_blocks(scan<Config, kReverse>, args, segments.boundaries(problem) * kHeads * tiles,
             Config::kThreads);
  double worst = 0;
  for (size_t i = 0; i < memory.size(); ++i) {
    if (std::isnan(expected[i]) != std::isnan(memory[i])) return 1;
    if (!std::isnan(expected[i])) worst = std::fmax(worst, std::abs(expected[i] - memory[i]));
  }
  return worst;
}

int main() {
  std::printf("%g %g %g", error_of<ScanConfig<kDim>, false>(),
              error_of<ScanConfig<kDim, 4>, false>(), error_of<ScanConfig<kDim, 4>, true>());
}
"""


# Which chunks the chains of passes 1 and 3 go through: prints how many do not have one reverse
# chain and one of states, and how many segments lie between others.
WORK = """
struct WorkArgs {
  FwdProblem problem;
  Segments segments;
  int* chains;  // [chunk][head][tile]
};

constexpr int kTiles = 2, kHeads = 3;

template <SegmentWork (*kWork)(const FwdProblem&, const Segments&, uint32_t, int, uint32_t)>
void count(const WorkArgs& args) {
  auto const work = kWork(args.problem, args.segments, kTiles, 64, blockIdx.x);
  if (threadIdx.x > 0 || !work.exists) return;
  for (int row = 0; row < work.span.count; row += kChunk) {
    int64_t const head = (work.first_chunk + row / kChunk) * kHeads + work.head;
    ++args.chains[head * kTiles + work.column / 64];
  }
}

int inner = 0;
void count_inner(const WorkArgs& args) {
  Pass1Work const work(args.problem, args.segments, kTiles, 64, false);
  inner += threadIdx.x == 0 && work.exists;
}

int main(int words, char** given) {
  bool const packed = std::atoi(given[1]) != 0;
  int const first_length = 2, sequences = words - first_length;
  std::vector<int> lengths(sequences), offsets(sequences + 1);
  for (int i = 0; i < sequences; ++i) {
    lengths[i] = std::atoi(given[first_length + i]);
    offsets[i + 1] = offsets[i] + lengths[i];
  }
  FwdProblem problem{};
  problem.sequences = sequences;
  problem.heads = problem.heads_qk = kHeads;
  problem.group = 1;
  problem.head_dim = problem.head_dim_v = 128;
  problem.rows = {packed ? offsets.data() : nullptr, packed ? offsets.back() : lengths[0],
                  offsets.back()};
  Segments const segments{2 * kChunk};
  int64_t const boundaries = segments.boundaries(problem);
  int const lasts = sequences * kHeads * kTiles, others = boundaries * kHeads * kTiles;
  int wrong = 0;
  auto const check = [&](auto* of_sequences, auto* of_boundaries) {
    std::vector<int> chains(problem.rows.tiles(sequences, kChunk) * kHeads * kTiles);
    WorkArgs const args{problem, segments, chains.data()};
    run_blocks(of_sequences, args, lasts, 32);
    run_blocks(of_boundaries, args, others, 32);
    for (int i = 0; i < sequences; ++i) {
      int64_t const first = problem.rows.first_tile(i, kChunk) * kHeads * kTiles;
      int64_t const count = (lengths[i] + kChunk - 1) / kChunk * kHeads * kTiles;
      for (int64_t n = 0; n < count; ++n) wrong += chains[first + n] != 1;
    }
  };
  check(count<SegmentWork::last_segment>, count<SegmentWork::ending_at_boundary>);
  check(count<SegmentWork::first_segment>, count<SegmentWork::starting_at_boundary>);
  run_blocks(count_inner, WorkArgs{problem, segments, nullptr}, others, 32);
  std::printf("%d %d", wrong, inner / (kHeads * kTiles));
}
"""


# Takes a head dim. Stores the transitions of inner segments as pass 1 does; prints how many
# elements are wrong.
STORES = """
constexpr int kDim = 128, kHeads = 2, kRows = kChunk, kLength = 4 * kRows + 1;

struct StoreArgs {
  FwdProblem problem;
  Segments segments;
  SegmentStates between, grads;
};

float element(int boundary, int head, int v, int k) {
  return static_cast<float>(((boundary * kHeads + head) * kDim + v) * kDim + k);
}

void store(const StoreArgs& args) {
  Pass1Work const work(args.problem, args.segments, 1 + kDim / 64, 64, false);
  if (!work.exists || !work.is_transition) return;
  float state[kDim / 2];
  for (int i = 0; i < kDim / 2; ++i) {
    StateCoordinate const at(flashvar::Lane(), work.column, i);
    state[i] = at.k < args.problem.head_dim ? element(work.after, work.head, at.v, at.k) : 0;
  }
  store_last_state<kDim>(args.problem, args.between, work, work.column, state);
  store_transposed<kDim>(args.problem, args.grads, work, work.column, state);
}

int main(int, char** given) {
  int const head_dim = std::atoi(given[1]);
  FwdProblem problem{};
  problem.sequences = 1;
  problem.heads = problem.heads_qk = kHeads;
  problem.group = 1;
  problem.head_dim = head_dim;
  problem.head_dim_v = 64;
  problem.rows = {nullptr, kLength, kLength};
  Segments const segments{kRows};
  int64_t const floats = SegmentStates(problem, segments, kDim, nullptr).bytes / sizeof(float);
  // Behind what the call may use lies as much again.
  std::vector<float> memory(4 * floats, -1.f);
  StoreArgs const args{problem, segments, {problem, segments, kDim, memory.data()},
                       {problem, segments, kDim, memory.data() + floats}};
  int const boundaries = segments.boundaries(problem);
  run_blocks(store, args, boundaries * kHeads * (1 + kDim / 64), 128);
  int wrong = 0;
  for (int boundary = 1; boundary < boundaries; ++boundary) {
    for (int head = 0; head < kHeads; ++head) {
      auto const at = [&](const State& of, int column, int row) -> float& {
        return of.data[boundary * of.sequence_stride + head * of.head_stride + column * kDim + row];
      };
      for (int v = 0; v < head_dim; ++v) {
        for (int k = 0; k < kDim; ++k) {
          float const expected = k < head_dim ? element(boundary, head, v, k) : 0;
          wrong += at(args.between.transitions, v, k) != expected;
          if (k < head_dim) wrong += at(args.grads.transitions, k, v) != expected;
        }
      }
    }
  }
  for (size_t i = 2 * floats; i < memory.size(); ++i) wrong += memory[i] != -1.f;
  std::printf("%d", wrong);
}
"""


Program = Callable[..., str]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """`program(text, *arguments)` is what it prints; each text is compiled once."""
    made: dict[str, Path] = {}

    def printed(text: str, *arguments: int) -> str:
        if text not in made:
            made[text] = host_program.executable(text, tmp_path_factory.mktemp("segments"))
        code, found = host_program.answer(made[text], *(str(int(one)) for one in arguments))
        assert code == 0
        return found

    return printed


def divided(program: Program, first_once: bool, sequences: int | None = None) -> list[int]:
    """A sequence in segments, or `sequences` that are packed."""
    packed = sequences is not None
    return [int(word) for word in program(SEGMENTS, first_once, packed, sequences or 1).split()]


@host_program.needs_compiler
def test_costs_of_segments(program: Program) -> None:
    """One head of 96 chunks: two blocks of 64 columns, or one of 128, go through a segment."""
    # Both passes over halves; thirds on all multiprocessors; four quarters, wide, and five blocks
    # of pass 1. The scan goes over count - 2 boundaries four times: 16 tiles of columns.
    assert divided(program, first_once=False) == [
        960,
        480 + 480,
        32 * 15 + 320 + 4,
        24 * 15 + 2 * 240 + 8,
        2048,
        2,
    ]
    # Of halves, pass 3 is the second; of thirds, pass 1 has the first in two blocks, and b and M of
    # the second.
    assert divided(program, first_once=True) == [
        960,
        480 + 480,
        320 + 320 + 4,
        24 * 15 + 2 * 240 + 8,
        2048,
        2,
    ]


@host_program.needs_compiler
@pytest.mark.parametrize(("sequences", "boundaries"), [(3, 2), (31, 2), (32, 0), (1000, 0)])
def test_many_packed_sequences_are_not_divided(
    sequences: int, boundaries: int, program: Program
) -> None:
    *_, rows, found = divided(program, first_once=True, sequences=sequences)
    assert (rows, found) == ((2048, boundaries) if boundaries else (0, 0))


@host_program.needs_compiler
@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        # Halves: three blocks in both passes, as the chains of two segments start from what is
        # known. Thirds: six, three of them of the inner segment; one boundary in 32 tiles of 8
        # columns, in pairs. Quarters: nine, in two waves. Memory: two boundaries' states,
        # gradients, and transitions twice.
        (1, [960, 480 + 480, 32 * 12 + 2 + 32 * 10, 48 * 12 + 2 * 2 + 48 * 10, 2048, 2, 8]),
        (2, [960, 480 + 480, 64 * 12 + 4 + 64 * 10, 72 * 12 + 4 * 2 + 72 * 10, 0, 0, 0]),
    ],
)
def test_costs_of_the_backward(heads: int, expected: list[int], program: Program) -> None:
    """96 chunks: a reverse chain has two blocks of 64 columns, one of states has one of 128."""
    assert [int(word) for word in program(GRAD_SEGMENTS, heads).split()] == expected


@host_program.needs_compiler
def test_scans(program: Program) -> None:
    """States from the front and gradients from the back, of packed sequences of any lengths."""
    assert max(float(word) for word in program(DEVICE + SCAN).split()) < 1e-4


@host_program.needs_compiler
@pytest.mark.parametrize("head_dim", [72, 96, 128])
def test_transitions_stay_in_their_memory(head_dim: int, program: Program) -> None:
    """Of a kernel for head dim 128, also where K is smaller: their rows and their columns."""
    assert program(DEVICE + STORES, head_dim) == "0"


@host_program.needs_compiler
@pytest.mark.parametrize(
    ("lengths", "packed"),
    [
        ((0, 400, 1, 128, 0, 129, 200, 700, 3), True),
        ((1,) * 40, True),
        ((500, 1, 1, 1), True),
        ((640,) * 3, False),
        ((129,) * 2, False),
    ],
    ids=str,
)
def test_chains_go_through_each_chunk_once(
    lengths: tuple[int, ...], packed: bool, program: Program
) -> None:
    """Chains of pass 1 with a known start, and all of pass 3; segments of 128 tokens."""
    inner = sum(max((length - 1) // 128 - 1, 0) for length in lengths)
    assert program(DEVICE + WORK, packed, *lengths) == f"0 {inner}"
