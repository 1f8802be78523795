"""A record's triangular matrix: where its chunks are stored, and what products read of it."""

from __future__ import annotations

import host_program
import pytest
import torch

pytestmark = host_program.needs_compiler

CHUNK = 64

# Element (i, j) of the matrix is 64 i + j + 1, or 0 above the diagonal. Prints the words that are
# stored, and offsets of chunks.
PROGRAM = """
#include <cstdio>
#include <cstring>
#include "device.h"
#include "gated_delta_rule/triangle.cuh"

using namespace flashvar::gated_delta_rule;
alignas(128) static unsigned char stored[kTriangleBytes];

int main() {
  std::memset(stored, 0xee, sizeof stored);
  for (uint32_t row = 0; row < 64; ++row) {
    for (uint32_t unit = 0; unit < (row < 32 ? 4 : 8); ++unit) {
      uint16_t elements[8];
      for (uint32_t i = 0; i < 8; ++i) {
        uint32_t const column = 8 * unit + i;
        elements[i] = column > row ? 0 : 64 * row + column + 1;
      }
      uint32_t const offset =
          Triangle::unit_offset(row, unit % 4) + unit / 4 * Triangle::kColBlockBytes;
      std::memcpy(stored + offset, elements, 16);
    }
  }
  for (int i = 0; i < kTriangleElements; ++i) {
    uint16_t word;
    std::memcpy(&word, stored + 2 * i, 2);
    std::printf("%d ", word);
  }
  for (uint32_t row = 0; row < 64; ++row) {
    for (int unit = 0; unit < 8; ++unit) {
      std::printf("%u ", Triangle::advance(Triangle::unit_offset(row, unit % 2), unit / 2 * 2));
    }
  }
}
"""


def matrix() -> torch.Tensor:
    number = torch.arange(CHUNK * CHUNK).view(CHUNK, CHUNK) + 1
    return number.tril()


def permuted(address: int) -> int:
    """SWIZZLE_64B: bits 7 and 8 of an address are added to bits 4 and 5."""
    return address ^ (address >> 3 & 0x30)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], list[int]]:
    """The words stored, and the offsets of 64 rows of 8 units."""
    code, text = host_program.run(PROGRAM, tmp_path_factory.mktemp("triangle"))
    assert code == 0
    words = [int(word) for word in text.split()]
    return words[: CHUNK * CHUNK * 3 // 4], words[CHUNK * CHUNK * 3 // 4 :]


def read_block(words: list[int], start: int, rows: int, columns: int) -> torch.Tensor:
    """What wgmma reads from `start`: rows of 64 bytes, eight after 512, columns of one page."""
    found = torch.empty(rows, columns, dtype=torch.int64)
    for row in range(rows):
        for column in range(columns):
            address = start + row // 8 * 512 + row % 8 * 64 + 2 * column
            found[row, column] = words[permuted(address) // 2]
    return found


def test_offsets_of_units(printed: tuple[list[int], list[int]]) -> None:
    """Those of ldmatrix, of what is not above the blocks on the diagonal."""
    words, offsets = printed
    expected = matrix()
    for row in range(CHUNK):
        for unit in range(row // 16 * 2 + 2):
            first = offsets[8 * row + unit] // 2
            eight = expected[row, 8 * unit : 8 * unit + 8].tolist()
            assert words[first : first + 8] == eight, (row, unit)


@pytest.mark.parametrize("half", [0, 1])
def test_rows_as_n(half: int, printed: tuple[list[int], list[int]]) -> None:
    """gemm_triangle's operand of k-steps of columns: 32 rows of the matrix."""
    for step in range(2 * half + 2):
        start = half * 2048 + step // 2 * 2048 + step % 2 * 32
        rows = slice(32 * half, 32 * half + 32)
        expected = matrix()[rows, 16 * step : 16 * step + 16]
        assert torch.equal(read_block(printed[0], start, 32, 16), expected)
    # What is left out is zeros.
    assert not matrix()[32 * half : 32 * half + 32, 32 * half + 32 :].any()


@pytest.mark.parametrize("half", [0, 1])
def test_columns_as_n(half: int, printed: tuple[list[int], list[int]]) -> None:
    """And of k-steps of rows: 32 columns of the matrix."""
    for step in range(2 * half, 4):
        start = half * 2048 + step * 1024
        expected = matrix()[16 * step : 16 * step + 16, 32 * half : 32 * half + 32]
        assert torch.equal(read_block(printed[0], start, 16, 32), expected)
    assert not matrix()[: 32 * half, 32 * half : 32 * half + 32].any()


def test_scores_as_a(printed: tuple[list[int], list[int]]) -> None:
    """ScoresTile: the second half behind 2 KB of zeros."""
    first, second = printed[0][:2048], printed[0][2048:]
    words = first + [0] * 1024 + second
    for step in range(4):
        start = step // 2 * 4096 + step % 2 * 32
        expected = matrix()[:, 16 * step : 16 * step + 16]
        assert torch.equal(read_block(words, start, CHUNK, 16), expected)
