// line_shift(): moves the columns of a tile so that TMA requests as few lines of memory as
// possible.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::attention {

using namespace flashvar::attention;  // what all architectures share

// By how many columns the rows of a tile move to the right. A row of 65 to 128 columns takes two
// column blocks. If it starts inside a line of 128 bytes, as it does in most heads unless the head
// dim is 128, both blocks may cross the boundary of a line: TMA then requests three or four lines
// for a row that lies in two. Moved by its distance from the start of the line, each line of the
// row is a column block. The columns in front of the row are outside the tensor, and so are zeros.
// 0 where the rows have different distances, or where the moved row does not fit `columns`.
__device__ __forceinline__ int32_t line_shift(const Tensor& tensor, int32_t head_dim,
                                              int32_t columns, uint32_t batch, uint32_t head) {
  constexpr uint32_t kColumns = kColBlockCols;
  if (tensor.seq_stride % kColBlockCols != 0) return 0;
  // Unsigned: wraps, and is right modulo kColumns.
  uint64_t const first = reinterpret_cast<uintptr_t>(tensor.data) / sizeof(*tensor.data) +
                         batch * static_cast<uint64_t>(tensor.batch_stride) +
                         head * static_cast<uint64_t>(tensor.head_stride);
  int32_t const shift = static_cast<int32_t>(first % kColumns);
  return shift + head_dim <= columns ? shift : 0;
}

}  // namespace flashvar::sm90::attention
