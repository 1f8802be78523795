"""The order in which blocks of keys add to dQ: src/cuda/core/mask.cuh against its definition."""

from __future__ import annotations

from pathlib import Path

import host_program

# Of every problem that is this small: blocks of keys that walk a block of queries take turns 0, 1,
# 2 ..., and whoever sees a query walks its block. Prints how many turns there were.
PROGRAM = """
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
using std::max;
using std::min;
#define __device__
#define __host__
#define __forceinline__ inline
#include "core/mask.cuh"

int main() {
  using flashvar::kUnbounded;
  int turns = 0;
  for (int block_q : {4, 8}) for (int block_kv : {4, 8})
  for (int count_q = 1; count_q < 22; ++count_q) for (int count_k = 1; count_k < 22; ++count_k)
  for (int left : {kUnbounded, 0, 3, 9}) for (int right : {kUnbounded, 0, 2, 11}) {
    flashvar::Mask const mask{count_q, count_k, left, right};
    for (int m = 0; m * block_q < count_q; ++m) {
      uint32_t turn = 0;
      for (int key = 0; key < count_k; key += block_kv) {
        int const last = min(key + block_kv, count_k) - 1;
        int const begin = mask.seeing_begin(key) / block_q;
        int const end = (mask.seeing_end(last) + block_q - 1) / block_q;
        bool const walks = begin <= m && m < end;
        for (int i = m * block_q; i < min((m + 1) * block_q, count_q); ++i) {
          for (int j = key; j <= last; ++j) {
            if (mask.visible_begin(i) <= j && j < mask.visible_end(i) && !walks) return 1;
          }
        }
        if (!walks) continue;
        if (flashvar::turn_at_queries(mask, key, m, block_q, block_kv) != turn) return 2;
        ++turn;
        ++turns;
      }
    }
  }
  std::printf("%d", turns);
}
"""


@host_program.needs_compiler
def test_turns_are_those_of_the_blocks_that_walk(tmp_path: Path) -> None:
    code, printed = host_program.run(PROGRAM, tmp_path)
    assert code == 0, {1: "a query is not walked", 2: "a turn is not next"}
    assert int(printed) > 100_000
