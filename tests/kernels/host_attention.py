"""A C++ function for host programs that makes an attention problem without tensors."""

from __future__ import annotations

from typing import Final

# For after the headers that a program includes.
PROBLEM: Final = """
// Dense queries and keys. Windows: negative where they have no bound.
flashvar::attention::FwdProblem made(int64_t batch, int32_t queries, int32_t keys, int32_t heads,
                                     int32_t group, int32_t left = -1, int32_t right = -1) {
  using flashvar::attention::kUnbounded;
  flashvar::attention::FwdProblem problem{};
  problem.batch = batch;
  problem.queries.seqlen = queries;
  problem.keys.seqlen = keys;
  problem.heads_q = heads;
  problem.group = group;
  problem.window_left = left < 0 ? kUnbounded : left;
  problem.window_right = right < 0 ? kUnbounded : right;
  return problem;
}
"""
# What the tiles' headers of 9.0 take of sm90/pipeline.cuh, which needs the driver's headers.
PIPELINE: Final = """
#pragma once
namespace flashvar::sm90 {
inline constexpr int kColBlockCols = 64;
}
"""
