"""What a warp reads of a bias that it staged: sm90/attention/bias_stage.cuh, on the host.

The warps' copies and reads in the orders that their barriers allow.
"""

from __future__ import annotations

from pathlib import Path

import host_program

# Warps stage tiles that lie within the tensor, across its ends and outside of it, and compare what
# each lane reads. Prints the first error, or how often rows that are read together share banks.
_PROGRAM = """
#include <cstdio>
#include "device.h"
#include "core/dtype.cuh"
#include "sm90/attention/bias_stage.cuh"

namespace dtype = flashvar::dtype;
using namespace flashvar::sm90::attention;

constexpr int kRows = 150, kColumns = 141, kFirst = 64;
constexpr int kRoom = kFirst + 152 * 160;
alignas(16) inline uint16_t word16[kRoom];
alignas(16) inline float word32[kRoom];

inline bool broadcast = false;
inline float expected(int row, int column) {
  if (row >= kRows || column >= kColumns) return 0.f;
  return static_cast<float>(((broadcast ? 0 : row) * 7 + column * 3) % 251);
}

template <int kQueries, int kKeys>
struct Config {
  using Dtype = dtype::bf16;
  static constexpr int kBiasQueries = kQueries, kBiasKeys = kKeys;
};

template <bool kRowsAreKeys, int kQueries, int kKeys>
void read(const Problem& problem) {
  uint32_t const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  BiasStage<Config<kQueries, kKeys>> const stage{1024 + warp * kQueries * kKeys * 4};
  for (int query : {0, 48, 128, 160}) {
    for (int key : {0, 64, 128, 192}) {
      int const first_key = key + (kRowsAreKeys ? static_cast<int>(warp) * 16 : 0);
      int const first_query = query + (kRowsAreKeys ? 0 : static_cast<int>(warp) * 16);
      stage.load(problem, 0, 0, first_query, first_key);
      stage.wait();
      for (int kk = 0; kk < (kRowsAreKeys ? kQueries : kKeys) / 16; ++kk) {
        float found[8];
        stage.template read<kRowsAreKeys>(kk, lane, problem.modifiers.bias_is_fp32, found);
        for (int i = 0; i < 8; ++i) {
          // Of an accumulator, relative to the fragment's first score.
          int const row = static_cast<int>(lane) / 4 + i / 2 % 2 * 8;
          int const column = 16 * kk + static_cast<int>(lane) % 4 * 2 + i / 4 * 8 + i % 2;
          float const wanted = expected(first_query + (kRowsAreKeys ? column : row),
                                        first_key + (kRowsAreKeys ? row : column));
          if (found[i] == wanted) continue;
          std::printf("%d keys, query %d, key %d, lane %d, %d of %d: %g, not %g", kKeys,
                      first_query, first_key, static_cast<int>(lane), i, kk, found[i], wanted);
          std::fflush(stdout);
          std::_Exit(1);  // on the stack of a thread that would be destroyed
        }
      }
    }
  }
}

void read_all(const Problem& problem) {
  read<true, 128, 16>(problem);
  __syncthreads();  // the next stages lie elsewhere
  read<true, 64, 16>(problem);
  __syncthreads();
  read<false, 16, 32>(problem);
  __syncthreads();
  read<false, 16, 64>(problem);
  __syncthreads();
  read<false, 16, 128>(problem);
}

// How many groups of rows that are read together have two in the same banks.
template <class Element, int kKeys>
int conflicts(bool rows_are_keys) {
  int found = 0;
  using Layout = BiasLayout<Element, kKeys>;
  constexpr uint32_t kUnits = 128 / Layout::kUnitBytes;  // read at a time
  for (uint32_t query = 0; query < (kKeys == 16 ? 64 : 16); query += 8) {
    for (uint32_t unit = 0; unit < kKeys / 8; ++unit) {
      for (uint32_t part = 0; part < 8 / kUnits; ++part) {
        uint32_t seen = 0;
        for (uint32_t i = 0; i < kUnits; ++i) {
          // Every second query where lanes hold pairs of queries.
          uint32_t const row = kUnits == 8 ? i : rows_are_keys ? 2 * i + part : 4 * part + i;
          seen |= 1u << Layout::offset(query + row, unit) % 128 / Layout::kUnitBytes;
        }
        found += seen != (1u << kUnits) - 1;
      }
    }
  }
  return found;
}

// Reads a bias whose rows start `offset` elements after an address of 16 bytes and are `stride`
// apart. Elements that are not in the tensor are NaN.
void read_bias(int offset, int stride, bool is_fp32) {
  for (int i = 0; i < kRoom; ++i) {
    word16[i] = 0x7fc0;
    word32[i] = NAN;
  }
  broadcast = stride == 0;
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      int const at = kFirst + offset + row * stride + column;
      word32[at] = expected(row, column);
      word16[at] = dtype::bf16::round(word32[at]);
    }
  }
  Problem problem{};
  problem.queries.seqlen = kRows;
  problem.keys.seqlen = kColumns;
  problem.modifiers.bias_is_fp32 = is_fp32;
  problem.modifiers.bias = {is_fp32 ? static_cast<void*>(word32 + kFirst + offset)
                                    : static_cast<void*>(word16 + kFirst + offset),
                            0, 0, stride};
  problem.modifiers.bias_alignment = problem.modifiers.bias.alignment(is_fp32 ? 4 : 2);
  run_blocks(read_all, problem, 2, 128);
}

int main() {
  for (bool is_fp32 : {false, true}) {
    read_bias(0, 144, is_fp32);  // on 16 bytes
    read_bias(2, 144, is_fp32);
    read_bias(0, 146, is_fp32);
    read_bias(1, 144, is_fp32);  // 16 bits: off 4 bytes
    read_bias(0, 141, is_fp32);
    read_bias(0, 0, is_fp32);  // broadcast
  }
  std::printf("right, %d conflicts",
              conflicts<dtype::bf16, 16>(true) + conflicts<dtype::fp32, 16>(true) +
                  conflicts<dtype::bf16, 32>(false) + conflicts<dtype::fp32, 32>(false) +
                  conflicts<dtype::bf16, 64>(false) + conflicts<dtype::fp32, 64>(false) +
                  conflicts<dtype::bf16, 128>(false) + conflicts<dtype::fp32, 128>(false));
}
"""


@host_program.needs_compiler
def test_a_lane_reads_what_its_accumulators_are_for(tmp_path: Path) -> None:
    """Of every alignment and both dtypes, across the ends of the tensor, in both orientations."""
    code, printed = host_program.run(_PROGRAM, tmp_path, None, "-Og")
    assert (code, printed) == (0, "right, 0 conflicts")
