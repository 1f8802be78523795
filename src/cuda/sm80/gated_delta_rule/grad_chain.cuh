// What both chains of the backward share: vectors of a record, images in workspace, and products
// with X o D.
#pragma once
#include <cstddef>
#include <cstdint>

#include "gated_delta_rule/grad_chunk.h"
#include "gated_delta_rule/grad_tokens.cuh"
#include "sm80/gated_delta_rule/fwd.cuh"

namespace flashvar::sm80::gated_delta_rule {

inline constexpr int kChainThreads = 128;
inline constexpr int kChainColumns = 64;

// The first vectors of a record: a, b, c, decay and growth, beta.
using Vectors = VectorOffsets<GradRecord>;
inline constexpr int kVectorBeta = offsetof(GradRecord, beta) - offsetof(GradRecord, a);
inline constexpr int kChainVectorBytes = kVectorBeta + sizeof(GradRecord::beta);

using Square = SmemLayout<kChunk, kChunk>;

// The place of a chunk's tile of columns of V in workspace.
struct TilePlace {
  int64_t record, tile;

  __device__ __forceinline__ TilePlace(const FwdProblem& problem, const Work& work, int32_t tiles,
                                       int32_t row)
      : record((work.first_chunk + row / kChunk) * problem.heads + work.head),
        tile(record * tiles + work.column / kChainColumns) {}
};

// Where a chunk begins, and how many rows its sequence has from there on.
struct ChunkPlace {
  int64_t batch, row;
  int32_t count;

  __device__ __forceinline__ ChunkPlace(const Work& work, int32_t row)
      : batch(work.batch), row(int64_t{work.span.first} + row), count(work.span.count - row) {}
  __device__ __forceinline__ ChunkPlace(int64_t batch, int64_t row, int32_t count)
      : batch(batch), row(row), count(count) {}

  __device__ __forceinline__ uint16_t* of(const Tensor& tensor, uint32_t head) const {
    return tensor.data + batch * tensor.batch_stride + row * tensor.seq_stride +
           head * tensor.head_stride;
  }
};

// Loads a chunk of a head's tensor, from `column` on, into a tile; zeros beyond the sequence and
// the columns.
template <class Layout, int kThreads>
__device__ __forceinline__ void load_rows(unsigned char* tile, const Tensor& from,
                                          const ChunkPlace& rows, uint32_t head, int32_t column,
                                          int32_t columns) {
  load_tile<Layout, kThreads, true>(tile, rows.of(from, head) + column, from.seq_stride, rows.count,
                                    columns - column);
}

// Stores operand A, the warp's 16 rows of 16 kSteps columns, to an image of 64 rows.
template <int kSteps>
__device__ __forceinline__ void store_image(unsigned char* image, const uint32_t (&a)[kSteps][4]) {
  using Layout = SmemLayout<64, 16 * kSteps>;
  Lane const lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const row = 16 * lane.warp + lane.g + 8 * half;
#pragma unroll
    for (int first = 0; first < 2 * kSteps; first += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = a[(first + i) / 2][i % 2 * 2 + half];
      uint4 const chunk = transpose_quad(words);
      int const column = first + lane.t;
      *reinterpret_cast<uint4*>(image + column / 8 * Layout::kColBlockBytes +
                                Layout::chunk_offset(row, column % 8)) = chunk;
    }
  }
}

// What packing leaves of accumulators, packed.
template <class Dtype, int kSteps>
__device__ __forceinline__ void pack_low(uint32_t (&low)[kSteps][4], const float (&d)[8 * kSteps]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    uint32_t const high = Dtype::pack(d[2 * i], d[2 * i + 1]);
    low[i / 4][i % 4] =
        Dtype::pack(d[2 * i] - Dtype::unpack(static_cast<uint16_t>(high)),
                    d[2 * i + 1] - Dtype::unpack(static_cast<uint16_t>(high >> 16)));
  }
}

// d -= M d', of each of the accumulators' rows: M is X o D, or with kTransposed its transpose, and
// d' d with columns scaled by beta. `matrix` is the record's in shared memory, overwritten in
// careful chunks, which all threads of the block know.
template <bool kTransposed>
__device__ __forceinline__ void solve(float (&d)[32], const GradRecord& record, uint32_t matrix,
                                      uint32_t beta, bool careful) {
  float scaled[32], product[32], undo[2];
#pragma unroll
  for (int i = 0; i < 32; ++i) scaled[i] = d[i];
  TokenFactors(beta).scale(scaled);
  uint32_t packed[4][4];
  pack_scaled(packed, scaled, undo);
  multiply_registers<dtype::fp16, Square, kTransposed, false>(product, packed, matrix);
  if (careful) {
    __syncthreads();  // the matrix has been read
    const auto* const low = reinterpret_cast<const uint4*>(record.inverse_low);
    for (int i = static_cast<int>(threadIdx.x); i < kSquareBytes / 16; i += kChainThreads) {
      uint4 const words = low[i];
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(matrix + 16 * i), "r"(words.x),
                   "r"(words.y), "r"(words.z), "r"(words.w)
                   : "memory");
    }
    __syncthreads();  // what is left of it is there
    multiply_registers<dtype::fp16, Square, kTransposed, true>(product, packed, matrix);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) d[i] = fmaf(-undo[i / 2 % 2], product[i], d[i]);
}

// Stores a number to an element of a row of an image: of row 16 warp + g + 8 half, by one lane of
// the quad.
template <class Dtype>
__device__ __forceinline__ void put_element(unsigned char* image, int token, int half, float high,
                                            unsigned char* image_low) {
  Lane const lane;
  if (lane.t != 0) return;
  int const row = 16 * lane.warp + lane.g + 8 * half;
  uint32_t const offset = Square::chunk_offset(row, token / 8) + token % 8 * 2;
  auto const word = static_cast<uint16_t>(Dtype::pack(high, 0.f));
  *reinterpret_cast<uint16_t*>(image + offset) = word;
  *reinterpret_cast<uint16_t*>(image_low + offset) =
      static_cast<uint16_t>(Dtype::pack(high - Dtype::unpack(word), 0.f));
}

}  // namespace flashvar::sm80::gated_delta_rule
