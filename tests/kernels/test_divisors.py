"""Division by multiplication: src/cuda/core/divisor.h against the divider."""

from __future__ import annotations

from pathlib import Path

import host_program

# Divisors around every power of two and all small ones; numbers around every multiple that tells,
# and the largest. Prints how many quotients there were.
PROGRAM = """
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include "cuda_runtime_api.h"
static uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
#include "core/divisor.h"

int main() {
  uint64_t const end = uint64_t{1} << 31;
  int quotients = 0;
  auto wrong = [&](uint64_t value) {
    flashvar::Divisor const divisor = flashvar::Divisor::make(static_cast<uint32_t>(value));
    for (uint64_t multiple = 0; multiple <= end; multiple += value * (1 + end / value / 999)) {
      for (uint64_t number : {multiple - 1, multiple, multiple + 1, end - 1 - multiple}) {
        if (number >= end) continue;
        ++quotients;
        if (static_cast<uint32_t>(number) / divisor != number / value) return true;
      }
    }
    return false;
  };
  for (uint64_t value = 1; value < 500; ++value) {
    if (wrong(value)) return 1;
  }
  for (int bit = 9; bit < 32; ++bit) {
    for (uint64_t value = (uint64_t{1} << bit) - 3; value < (uint64_t{1} << bit) + 4; ++value) {
      if (value < end && wrong(value)) return 1;
    }
  }
  std::printf("%d", quotients);
}
"""


@host_program.needs_compiler
def test_quotients_are_those_of_the_divider(tmp_path: Path) -> None:
    code, printed = host_program.run(PROGRAM, tmp_path)
    assert code == 0, "a quotient is not the divider's"
    assert int(printed) > 500_000
