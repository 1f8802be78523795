// LineShift: moves the columns of a tile so that TMA requests as few lines of memory as possible.
#pragma once
#include <cstdint>

#include "attention/problem.h"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// By how many columns the rows of a tile of K or V move to the right, and with them those of Q or
// of the output. A row of 65 to 128 columns takes two column blocks. If it starts inside a line of
// 128 bytes, both may cross the boundary of a line: TMA then requests three or four lines for a row
// that lies in two. Moved by its distance from the start of the line, the part of the row in each
// line is a column block, as long as the moved row fits the two blocks. The columns in front of it
// are outside the tensor, and so are zeros.
//
// Distances are in columns, modulo a line. The host gets them ready: the tensor's address and
// strides are constants that the kernel does not read otherwise, and would delay the first load.
struct LineShift {
  static constexpr uint32_t kLine = 64;  // columns

  uint8_t first = 0;                  // of the tensor's first row
  uint8_t to_batch = 0, to_head = 0;  // of neighboring sequences, and heads
  uint8_t most = 0;                   // with a larger one the row would not fit the tile

  // No shift if positions of a sequence have different distances. `columns`: of the tile. Host
  // only.
  static LineShift make(const Tensor& tensor, int32_t head_dim, int32_t columns) {
    if (tensor.seq_stride % kLine != 0) return {};
    // Unsigned: wraps, and is right modulo a line.
    auto const distance = [](uint64_t column) { return static_cast<uint8_t>(column % kLine); };
    return {distance(reinterpret_cast<uintptr_t>(tensor.data) / sizeof(*tensor.data)),
            distance(static_cast<uint64_t>(tensor.batch_stride)),
            distance(static_cast<uint64_t>(tensor.head_stride)),
            static_cast<uint8_t>(columns - head_dim)};
  }

  // Of the rows of a sequence and head.
  __host__ __device__ int32_t of(uint32_t batch, uint32_t head) const {
    uint32_t const shift = (first + batch * to_batch + head * to_head) % kLine;
    return shift <= most ? static_cast<int32_t>(shift) : 0;
  }
};

}  // namespace flashvar::sm90::attention
