"""Into how many segments a compiled gated_delta_rule divides sequences: by the sizes of a call."""

from __future__ import annotations

from pathlib import Path

import host_program
import pytest

SEGMENTS = """
#include <cstdio>
#include "gated_delta_rule/segments.h"

int main() {
  using namespace flashvar::gated_delta_rule;
  // Of 4 multiprocessors: a chunk takes 10 or 15, a boundary 1.
  ChainCosts const costs{4, 10, 15, 10, 1, 0, FIRST_ONCE};
  static int const offsets = 0;
  Problem problem{};
  problem.sequences = SEQUENCES;
  problem.heads = problem.heads_qk = problem.group = 1;
  problem.head_dim = problem.head_dim_v = 128;
  problem.rows = {PACKED ? &offsets : nullptr, 96 * kChunk, 96 * kChunk};
  for (int count = 1; count <= 4; ++count) {
    std::printf("%d ", static_cast<int>(chain_cost(problem, costs, 1, 96, count)));
  }
  Segments const segments = choose_segments(problem, costs);
  std::printf("%d %d", segments.rows, static_cast<int>(segments.boundaries(problem)));
}
"""

# Prints the chains' costs with 1 to 4 segments, and into how many rows they are divided.
GRAD_SEGMENTS = """
#include <cstdio>
#include "gated_delta_rule/grad_segments.h"

int main() {
  using namespace flashvar::gated_delta_rule;
  // Of 8 multiprocessors: a chunk takes 10, or 16 of two blocks; of segments 10 with results, or 12
  // of 128 columns without; a boundary 1.
  GradChainCosts const costs{8, {10, 16}, 10, 12, 1, 0};
  Problem problem{};
  problem.sequences = problem.heads_qk = problem.group = 1;
  problem.heads = HEADS;
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

# Runs both scans; prints their largest errors, or 1 where something else is read or written.
SCAN = """#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>
#include "device.h"
struct float2 {
  float x, y;
};
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
#define __CUDACC__  // what of the headers is of the device
#include "gated_delta_rule/segment_scan.cuh"

using namespace flashvar::gated_delta_rule;

constexpr int kDim = 64, kK = 40, kV = 24, kHeads = 2, kRows = kChunk;
constexpr int kLengths[] = {0, 400, 1, 64, 0, 70, 200, 700, 3};
constexpr int kSequences = sizeof(kLengths) / sizeof(int);

template <class Config>
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
          for (int c = 0; n > 0 && c < kK; ++c) {
            at(between.transitions, boundary, head, c, k) = k < kK ? drawn() : 0;
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
      int const to = first + (Config::kReverse ? count - 1 - n : n);
      int const from = to + (Config::kReverse ? 1 : -1), segment = Config::kReverse ? from : to;
      for (int head = 0; head < kHeads; ++head) {
        for (int v = 0; v < kV; ++v) {
          for (int k = 0; k < kK; ++k) {
            double sum = at(states, to, head, v, k);
            for (int c = 0; c < kK; ++c) {
              sum += double{Config::kReverse ? at(between.transitions, segment, head, k, c)
                                             : at(between.transitions, segment, head, c, k)} *
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
  run_blocks(scan_kernel<Config>, args, segments.boundaries(problem) * kHeads * tiles,
             Config::kThreads);
  double worst = 0;
  for (size_t i = 0; i < memory.size(); ++i) {
    if (std::isnan(expected[i]) != std::isnan(memory[i])) return 1;
    if (!std::isnan(expected[i])) worst = std::fmax(worst, std::abs(expected[i] - memory[i]));
  }
  return worst;
}

int main() {
  std::printf("%g %g", error_of<ScanConfig<kDim>>(), error_of<ScanConfig<kDim, true>>());
}
"""


def divided(folder: Path, first_once: bool, packed: bool = False, sequences: int = 1) -> list[int]:
    program = SEGMENTS
    for name, value in (
        ("FIRST_ONCE", first_once),
        ("PACKED", packed),
        ("SEQUENCES", sequences),
    ):
        program = program.replace(name, str(value).lower())
    code, printed = host_program.run(program, folder)
    assert code == 0
    return [int(word) for word in printed.split()]


@host_program.needs_compiler
def test_costs_of_segments(tmp_path: Path) -> None:
    """One head of 96 chunks: two blocks of 64 columns, or one of 128, go through a segment."""
    # Both passes over halves; thirds on all multiprocessors; four quarters, wide, and five blocks
    # of pass 1. The scan goes over count - 2 boundaries four times: 16 tiles of columns.
    assert divided(tmp_path, first_once=False) == [
        960,
        480 + 480,
        32 * 15 + 320 + 4,
        24 * 15 + 2 * 240 + 8,
        2048,
        2,
    ]
    # Of halves, pass 3 is the second; of thirds, pass 1 has the first in two blocks, and b and M of
    # the second.
    assert divided(tmp_path, first_once=True) == [
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
    sequences: int, boundaries: int, tmp_path: Path
) -> None:
    *_, rows, found = divided(tmp_path, first_once=True, packed=True, sequences=sequences)
    assert (rows, found) == ((2048, boundaries) if boundaries else (0, 0))


@host_program.needs_compiler
@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        # Halves: three blocks in both passes, as the chains of two segments start from what is
        # known. Thirds: six, three of them of the inner segment; one boundary in 32 tiles of 8
        # columns. Quarters: nine, in two waves. Memory: two boundaries' states, transitions and
        # gradients.
        (1, [960, 480 + 480, 32 * 12 + 4 + 32 * 10, 48 * 12 + 4 * 2 + 48 * 10, 2048, 2, 6]),
        (2, [960, 480 + 480, 64 * 12 + 8 + 64 * 10, 72 * 12 + 8 * 2 + 72 * 10, 0, 0, 0]),
    ],
)
def test_costs_of_the_backward(heads: int, expected: list[int], tmp_path: Path) -> None:
    """96 chunks: a reverse chain has two blocks of 64 columns, one of states has one of 128."""
    code, printed = host_program.run(GRAD_SEGMENTS.replace("HEADS", str(heads)), tmp_path)
    assert (code, [int(word) for word in printed.split()]) == (0, expected)


@host_program.needs_compiler
def test_scans(tmp_path: Path) -> None:
    """States from the front and gradients from the back, of packed sequences of any lengths."""
    code, printed = host_program.run(SCAN, tmp_path)
    assert code == 0
    assert max(float(word) for word in printed.split()) < 1e-4
