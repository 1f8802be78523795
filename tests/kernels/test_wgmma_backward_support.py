"""Which calls the wgmma backward leaves to the mma.sync kernels, whatever their addresses."""

from __future__ import annotations

import host_attention
import host_program
import pytest

pytestmark = host_program.needs_compiler

# A line for each call: why, or "wgmma".
_PROGRAM = """
#include <cuda_runtime.h>

#include <cstdio>

#include "sm90/attention/bwd_support.h"

using namespace flashvar::sm90::attention;

void print(const BwdProblem& problem, int head_dim = 64) {
  const char* why = bwd_unsupported(problem, head_dim <= 128);
  std::printf("%s\\n", why == nullptr ? "wgmma" : why);
}

int main() {
  static const int32_t offsets[3] = {0, 3, 80};
  BwdProblem plain{};
  plain.batch = 2;
  plain.queries.seqlen = plain.keys.seqlen = 70;
  print(plain);
  BwdProblem biased = plain;
  biased.modifiers.bias.data = &biased;
  for (int head_dim : {32, 64, 128, 192, 256}) print(biased, head_dim);
  biased.grad_bias.data = &biased;
  biased.deterministic = true;
  biased.modifiers.bias_is_fp32 = true;
  for (int head_dim : {32, 64, 128, 192, 256}) print(biased, head_dim);
  BwdProblem packed = plain;
  packed.queries.offsets = offsets;
  for (int64_t rows : {63, 64}) {
    packed.queries.total = rows;
    print(packed);
  }
  packed.queries.total = 63;
  packed.keys.seqlen = 64;
  for (int head_dim : {64, 128, 192}) print(packed, head_dim);
  packed.queries.total = 0;
  print(packed);
  plain.keys.seqlen = 0;
  print(plain);
}
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    code, text = host_program.run(
        _PROGRAM, tmp_path_factory.mktemp("support"), {"sm90/pipeline.cuh": host_attention.PIPELINE}
    )
    assert code == 0
    return text.splitlines()


def test_a_bias_is_supported(printed: list[str]) -> None:
    assert printed[1:6] == ["wgmma"] * 5


def test_the_gradient_of_a_bias_is_supported_up_to_head_dim_128(printed: list[str]) -> None:
    assert printed[6:9] == ["wgmma"] * 3
    why = "the wgmma backward does not support the gradient of a bias above head dim 128"
    assert printed[9:11] == [why] * 2


def test_other_calls(printed: list[str]) -> None:
    assert printed[0] == "wgmma"
    assert printed[11].endswith("on average, if they may have more than 64 keys")
    assert printed[12] == "wgmma"
    assert printed[16:18] == ["there are no scores"] * 2


def test_few_queries_on_average_take_small_tiles(printed: list[str]) -> None:
    assert printed[13:15] == ["wgmma"] * 2
    assert printed[15].endswith("fewer than 32 queries on average above head dim 128")
