// Tensor maps that clip at the end of a varlen sequence. Host only.
#pragma once
#include <cstdint>

#include "core/tensor_map.h"
#include "core/tensor_view.h"

namespace flashvar::sm90 {

// Rows after a sequence's end belong to the next sequence. In a clipped map a coordinate says where
// a box must end, and TMA writes zeros after that: the tensor's R rows are two dimensions of the
// map, both with the stride of rows. The first has R elements and clips the box; the second shifts
// it. The map's base address lies R rows in front of the tensor. Row r of a sequence of n rows that
// ends at tensor row `end` has the coordinates {column, R - n + r, head, end, batch}: tensor row
// (R - n + r) + end - R = end - n + r. Boxes are one column block (128 bytes) of `box_rows` rows of
// one head, and at least one element of a box must be in the tensor (col_blocks_of in
// pipeline.cuh). cudaErrorNotSupported: the map would begin below address 0, because the tensor has
// no room for R rows in front of it.
template <class Element>
cudaError_t encode_clipped_map(CUtensorMap& map, CUtensorMapDataType type,
                               const TensorView<Element>& tensor, int64_t rows, int64_t heads,
                               int64_t batch, int64_t dim, int box_rows) {
  constexpr int kElementBytes = sizeof(Element);
  auto const size = [](int64_t count) { return static_cast<cuuint64_t>(count > 0 ? count : 1); };
  if (!has_room_in_front(tensor, rows)) return cudaErrorNotSupported;
  cuuint64_t const dims[5] = {size(dim), size(rows), size(heads), size(rows) + 1, size(batch)};
  auto const bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride * kElementBytes); };
  cuuint64_t const strides[4] = {bytes(tensor.seq_stride), bytes(tensor.head_stride),
                                 bytes(tensor.seq_stride), bytes(tensor.batch_stride)};
  cuuint32_t const box[5] = {128 / kElementBytes, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  return encode_tensor_map(map, type, 5, tensor.data - rows * tensor.seq_stride, dims, strides,
                           box);
}

}  // namespace flashvar::sm90
