// Loads of a chunk into shared memory, with cp.async: rows of tensors, and what records and images
// hold contiguously.
#pragma once
#include <cstdint>

#include "gated_delta_rule/chain_parts.cuh"
#include "sm80/pipeline.cuh"

namespace flashvar::sm80::gated_delta_rule {

using namespace flashvar::gated_delta_rule;  // what all architectures share

// Coordinate of a chunk in dense or varlen tensors, and the rows of its sequence from there on.
struct ChunkCoordinate {
  int64_t batch, row;
  int32_t count;

  __device__ __forceinline__ ChunkCoordinate(const Work& work, int32_t row)
      : batch(work.batch), row(int64_t{work.span.first} + row), count(work.span.count - row) {}
  __device__ __forceinline__ ChunkCoordinate(int64_t batch, int64_t row, int32_t count)
      : batch(batch), row(row), count(count) {}

  __device__ __forceinline__ uint16_t* address(const Tensor& tensor, uint32_t head) const {
    return tensor.data + batch * tensor.batch_stride + row * tensor.seq_stride +
           head * tensor.head_stride;
  }
};

// Starts loading a chunk of a head's tensor, `columns` columns from `column` on, into a tile
// (cp.async). Rows past the sequence's end, and the tile's other columns, become zeros.
template <class Layout, int kThreads>
__device__ __forceinline__ void load_rows(unsigned char* tile, const Tensor& from,
                                          const ChunkCoordinate& rows, uint32_t head,
                                          int32_t column, int32_t columns) {
  load_tile<Layout, kThreads, true>(tile, rows.address(from, head) + column, from.seq_stride,
                                    rows.count, columns);
}

// Starts copies of `bytes` contiguous bytes (cp.async), by all threads of the block.
template <int kThreads = 128>
__device__ __forceinline__ void copy_async(uint32_t smem, const void* from, int bytes) {
  const char* const source = static_cast<const char*>(from);
  for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += kThreads * 16) {
    ptx::cp_async_16(smem + i, source + i, true);
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
