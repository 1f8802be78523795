"""Tensor maps that clip start in front of a tensor: which tensors have room for that."""

from __future__ import annotations

import host_program
import pytest

pytestmark = host_program.needs_compiler

# A line for each address, in rows; in it a digit for each tensor that lies there: q, dO, k, v.
PROGRAM = """
#include <cuda_runtime.h>

#include <cstdio>

#include "sm90/attention/bwd_support.h"

using namespace flashvar::sm90::attention;

int main() {
  static const int32_t offsets[3] = {0, 3, 10};
  constexpr uint64_t kHigh = 0x7f0000000000, kRow = 64 * 2;
  for (uint64_t rows : {9, 10, 11, 20, 21}) {
    for (int which = 0; which < 4; ++which) {
      BwdProblem problem{};
      flashvar::attention::Tensor* const tensors[4] = {&problem.q, &problem.grad_out, &problem.k,
                                                       &problem.v};
      for (int i = 0; i < 4; ++i) {
        uint64_t const address = i == which ? rows * kRow : kHigh;
        *tensors[i] = {reinterpret_cast<uint16_t*>(address), 0, 64, 8};
      }
      problem.queries.seqlen = 7;
      problem.queries.total = 10;
      problem.queries.offsets = offsets;  // 10 rows
      problem.keys.seqlen = 20;           // 20 rows
      std::printf("%d", maps_can_be_clipped(problem));
    }
    std::printf("\\n");
  }
}
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    code, text = host_program.run(PROGRAM, tmp_path_factory.mktemp("maps"))
    assert code == 0
    return text.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [(0, "0000"), (1, "1100"), (2, "1100"), (3, "1111"), (4, "1111")],
    ids=["9 rows", "10 rows", "11 rows", "20 rows", "21 rows"],
)
def test_room_in_front_of_tensors(line: int, expected: str, printed: list[str]) -> None:
    """Of q and dO for 10 packed rows, of k and v for 20."""
    assert printed[line] == expected
