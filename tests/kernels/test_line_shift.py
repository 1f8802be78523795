"""By how many columns the forward of 9.0 moves rows, on the host."""

from __future__ import annotations

import ctypes
import itertools

import host_program
import pytest

pytestmark = host_program.needs_compiler

_PROGRAM = """
#define __CUDACC__
#include "device.h"
using std::max, std::min;
#include "sm90/attention/line_shift.h"
using namespace flashvar;

// `first`: the tensor's address, in elements; strides of batch, sequence and head.
extern "C" int32_t line_shift(uint64_t first, const int64_t* strides, int32_t head_dim,
                              int32_t columns, uint32_t batch, uint32_t head) {
  TensorView<uint16_t> const tensor{reinterpret_cast<uint16_t*>(2 * first), strides[0], strides[1],
                                    strides[2]};
  return sm90::attention::LineShift::make(tensor, head_dim, columns).of(batch, head);
}
"""
LINE = 64  # elements of 128 bytes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("shift")
    return host_program.library(_PROGRAM, folder)


def shift_of(
    library: ctypes.CDLL,
    first: int,
    strides: tuple[int, int, int],
    head_dim: int,
    batch: int,
    head: int,
) -> int:
    values = (ctypes.c_int64 * 3)(*strides)
    return int(library.line_shift(ctypes.c_uint64(first), values, head_dim, 2 * LINE, batch, head))


def lines(first: int, end: int) -> int:
    return -(-end // LINE) - first // LINE if end > first else 0


def requests(row: int, head_dim: int, shift: int) -> int:
    """Lines of the boxes in which a row from element `row` on is loaded."""
    boxes = [(row - shift + block * LINE, row - shift + (block + 1) * LINE) for block in range(2)]
    return sum(lines(max(a, row), min(b, row + head_dim)) for a, b in boxes)


@pytest.mark.parametrize("head_dim", range(8, 136, 8))
@pytest.mark.parametrize("heads", [1, 2, 3, 8, 20])
def test_rows_are_moved_to_as_few_lines_as_they_have(
    heads: int, head_dim: int, library: ctypes.CDLL
) -> None:
    padded = -(-heads * head_dim // LINE) * LINE
    for base, seq_stride in itertools.product((0, 8, 40, 56), (padded, padded + LINE, padded + 8)):
        first, strides = 2**41 + base, (7 * seq_stride + 16, seq_stride, head_dim)
        for batch, head in itertools.product((0, 3), range(heads)):
            shift = shift_of(library, first, strides, head_dim, batch, head)
            rows = [first + batch * strides[0] + n * seq_stride + head * head_dim for n in range(9)]
            if seq_stride % LINE or rows[0] % LINE + head_dim > 2 * LINE:
                assert shift == 0
                continue
            assert shift % 8 == 0
            assert shift + head_dim <= 2 * LINE
            for row in rows:
                assert requests(row, head_dim, shift) == lines(row, row + head_dim)


@pytest.mark.parametrize("stride", [-72, -8])
def test_tensors_whose_strides_are_negative(stride: int, library: ctypes.CDLL) -> None:
    assert shift_of(library, 2**41, (0, LINE, stride), 72, 0, 3) == 3 * stride % LINE
