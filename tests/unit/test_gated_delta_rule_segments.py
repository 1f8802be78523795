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
@pytest.mark.parametrize(("sequences", "boundaries"), [(3, 3), (31, 3), (32, 0), (1000, 0)])
def test_many_packed_sequences_are_not_divided(
    sequences: int, boundaries: int, tmp_path: Path
) -> None:
    *_, rows, found = divided(tmp_path, first_once=True, packed=True, sequences=sequences)
    assert (rows, found) == ((2048, boundaries) if boundaries else (0, 0))
