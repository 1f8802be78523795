"""The online softmax of kernels, on the host: rows of any scores, block by block."""

from __future__ import annotations

import math

import host_program
import pytest

Shares = dict[tuple[float, float], list[float]]

# A row whose first block of keys has one score, and whose second another, as kernels process them:
# for each pair of scores among the arguments. Prints the two keys' shares and the log-sum-exp, a
# line a row. Products are not rounded before the difference.
_PROGRAM = """
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include "device.h"
inline float __logf(float x) { return std::log(x); }
#include "attention/online_softmax.cuh"

constexpr float kInfinity = INFINITY;
float scores[2];
void run(const float& scale_log2) {
  flashvar::attention::OnlineSoftmax<1> softmax;
  float p[2] = {};
  int block = 0;
  for (float score : scores) {
    float shift;
    float const factor = softmax.advance(0, score, scale_log2, shift);
    for (float& share : p) share *= factor;
    // Operand A of the GEMM is in 16 bits.
    float const share = flashvar::exp2_approx(std::fma(score, scale_log2, -shift));
    p[block] = share > 65504.f ? kInfinity : share;
    softmax.row_sum[0] += threadIdx.x % 4 == 0 ? share : 0.f;
    ++block;
  }
  float lse;
  float const inverse = softmax.finish(0, scale_log2, lse);
  if (threadIdx.x == 0) std::printf("%g %g %g\\n", p[0] * inverse, p[1] * inverse, lse);
}

int main(int count, char** words) {
  for (int i = 1; i < count; i += 2) {
    for (int k = 0; k < 2; ++k) scores[k] = std::strtof(words[i + k], nullptr);
    run_blocks(run, 1.f / flashvar::kLn2, 1, 32);
  }
}
"""
LOWEST = (-65504.0, -1e7, -1e9, -1e10, -3.3895314e38, -3.4028234e38, -math.inf)


USUAL = (-2.0, 3.0)
ROWS = (
    USUAL,
    *(row for lowest in LOWEST for row in ((lowest, 1.5), (1.5, lowest), (lowest, lowest))),
)


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Shares:
    """By a row's scores: the keys' shares, and the log-sum-exp."""
    words = [repr(score) for row in ROWS for score in row]
    code, printed = host_program.run(_PROGRAM, tmp_path_factory.mktemp("softmax"), arguments=words)
    assert code == 0
    lines = [[float(word) for word in line.split()] for line in printed.splitlines()]
    return dict(zip(ROWS, lines, strict=True))


@host_program.needs_compiler
@pytest.mark.parametrize("hidden_first", [True, False])
@pytest.mark.parametrize("lowest", LOWEST)
def test_a_mask_may_add_a_finite_number(lowest: float, hidden_first: bool, shares: Shares) -> None:
    scores = (lowest, 1.5) if hidden_first else (1.5, lowest)
    *found, lse = shares[scores]
    assert found == ([0, 1] if hidden_first else [1, 0])
    assert lse == pytest.approx(1.5)


@host_program.needs_compiler
@pytest.mark.parametrize("lowest", LOWEST)
def test_rows_of_nothing_else(lowest: float, shares: Shares) -> None:
    found = shares[lowest, lowest]
    if lowest >= -1e7:
        assert found == pytest.approx([0.5, 0.5, lowest + math.log(2)], rel=1e-5)
    else:
        assert found == [0, 0, -math.inf]


@host_program.needs_compiler
def test_rows_of_usual_scores(shares: Shares) -> None:
    found = shares[USUAL]
    small = 1 / (1 + math.exp(5))
    assert found == pytest.approx([small, 1 - small, 3 + math.log1p(math.exp(-5))], rel=1e-5)
