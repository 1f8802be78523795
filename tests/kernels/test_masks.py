"""Which query blocks see a key block: src/cuda/attention/mask.cuh against its definition."""

from __future__ import annotations

from pathlib import Path

import host_program

# Of every problem that is this small: a key is seen by those queries that see it, and whoever sees
# a key of a block is visited by it. Prints how many pairs see each other.
PROGRAM = """
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include "cuda_runtime_api.h"
#include "attention/mask.cuh"

int main() {
  using flashvar::attention::kUnbounded;
  int pairs = 0;
  for (int block_q : {4, 8}) for (int block_kv : {4, 8})
  for (int count_q = 1; count_q < 22; ++count_q) for (int count_k = 1; count_k < 22; ++count_k)
  for (int left : {kUnbounded, 0, 3, 9}) for (int right : {kUnbounded, 0, 2, 11}) {
    flashvar::attention::Mask const mask{count_q, count_k, left, right};
    for (int j = 0; j < count_k; ++j) {
      int const key = j / block_kv * block_kv, last = min(key + block_kv, count_k) - 1;
      int const begin = mask.query_begin(key) / block_q;
      int const end = (mask.query_end(last) + block_q - 1) / block_q;
      for (int i = 0; i < count_q; ++i) {
        bool const sees = mask.key_begin(i) <= j && j < mask.key_end(i);
        if (sees != (mask.query_begin(j) <= i && i < mask.query_end(j))) return 1;
        if (sees && (i / block_q < begin || i / block_q >= end)) return 2;
        pairs += sees;
      }
    }
  }
  std::printf("%d", pairs);
}
"""


@host_program.needs_compiler
def test_keys_are_walked_by_the_queries_that_see_them(tmp_path: Path) -> None:
    code, printed = host_program.run(PROGRAM, tmp_path, None, "-O1")
    assert code == 0, {1: "keys and queries disagree", 2: "a query is not visited"}
    assert int(printed) > 100_000
