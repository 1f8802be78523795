// Parts of both chains of the backward on sm80: loads of chunks, and solve().
#pragma once
#include <cstdint>

#include "gated_delta_rule/grad_chain.cuh"
#include "gated_delta_rule/grad_chunk.h"
#include "gated_delta_rule/grad_tokens.cuh"
#include "sm80/gated_delta_rule/fwd.cuh"

namespace flashvar::sm80::gated_delta_rule {

inline constexpr int kChainThreads = 128;

// Coordinate of a chunk in dense or varlen tensors, and the rows of its sequence from there on.
struct ChunkCoordinate {
  int64_t batch, row;
  int32_t count;

  __device__ __forceinline__ ChunkCoordinate(const Work& work, int32_t row)
      : batch(work.batch), row(int64_t{work.span.first} + row), count(work.span.count - row) {}
  __device__ __forceinline__ ChunkCoordinate(int64_t batch, int64_t row, int32_t count)
      : batch(batch), row(row), count(count) {}

  __device__ __forceinline__ uint16_t* of(const Tensor& tensor, uint32_t head) const {
    return tensor.data + batch * tensor.batch_stride + row * tensor.seq_stride +
           head * tensor.head_stride;
  }
};

// Starts loading a chunk of a head's tensor, from `column` on, into a tile (cp.async). Rows past
// the sequence and columns past `columns` become zeros.
template <class Layout, int kThreads>
__device__ __forceinline__ void load_rows(unsigned char* tile, const Tensor& from,
                                          const ChunkCoordinate& rows, uint32_t head,
                                          int32_t column, int32_t columns) {
  load_tile<Layout, kThreads, true>(tile, rows.of(from, head) + column, from.seq_stride, rows.count,
                                    columns - column);
}

// d -= M d', for each row of the accumulators: M is X o D, or with kTransposed its transpose; d' is
// d with columns scaled by beta. `matrix`: X o D in shared memory. In careful chunks it is
// overwritten with its low part, for a second product; `careful` is the same in all threads of the
// block.
template <bool kTransposed>
__device__ __forceinline__ void solve(float (&d)[32], const GradRecord& record, uint32_t matrix,
                                      uint32_t beta, bool careful) {
  float product[32], descale[2];
  uint32_t packed[4][4];
  start_solve(packed, descale, d, beta);
  multiply_registers<dtype::fp16, Triangle, kTransposed, false>(product, packed, matrix);
  if (careful) {
    __syncthreads();  // all warps have read the high part
    copy_inverse_low(matrix, record, kChainThreads);
    __syncthreads();  // the low part is written
    multiply_registers<dtype::fp16, Triangle, kTransposed, true>(product, packed, matrix);
  }
  finish_solve(d, product, descale);
}

}  // namespace flashvar::sm80::gated_delta_rule
