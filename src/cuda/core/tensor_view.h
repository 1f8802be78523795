// Views of tensors in device memory.
#pragma once
#include <cstdint>

namespace flashvar {

// [batch, sequence, heads, dim], the last dimension contiguous; strides in elements. Varlen tensors
// have no batch dimension: their batch stride is 0.
template <class Element>
struct TensorView {
  Element* data;
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
};

// Whether every row starts at a multiple of 16 bytes, as TMA and 16-byte accesses require.
template <class Element>
bool rows_are_aligned(const TensorView<Element>& tensor) {
  constexpr int64_t kElements = 16 / sizeof(Element);
  int64_t const strides = tensor.batch_stride | tensor.seq_stride | tensor.head_stride;
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && strides % kElements == 0;
}

// Whether the address space has room for `rows` more rows in front of the tensor.
template <class Element>
bool has_room_in_front(const TensorView<Element>& tensor, int64_t rows) {
  return reinterpret_cast<uintptr_t>(tensor.data) / sizeof(Element) >=
         static_cast<uint64_t>(rows * tensor.seq_stride);
}

}  // namespace flashvar
