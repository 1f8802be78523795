"""Parts of host programs for attention: headers, and a problem without tensors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import host_program

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

_RUNTIME: Final = """
#define __CUDACC__
#include <algorithm>
#include "device.h"
using std::max, std::min;
#include "core/dtype.cuh"
"""
_NAMESPACES: Final = """
using namespace flashvar;
using namespace flashvar::sm90::attention;
"""


def program(functions: str, *headers: str) -> str:
    """A host program of headers of the attention kernels of 9.0, and functions that use them."""
    includes = "".join(f'#include "sm90/attention/{name}"\n' for name in headers)
    return f"{_RUNTIME}{includes}{_NAMESPACES}{PROBLEM}{functions}"


def library(folder: Path, functions: str, *headers: str) -> ctypes.CDLL:
    """That program, compiled in this folder."""
    return host_program.library(
        program(functions, *headers), folder, {"sm90/pipeline.cuh": PIPELINE}
    )
