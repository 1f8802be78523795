// Parts of the chains of the forward and of the backward: pairs of mbarriers, TMA loads of a
// chunk's rows, and stores of operands to shared memory.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "gated_delta_rule/chain_parts.cuh"
#include "gated_delta_rule/triangle.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/vectors.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/gemm.cuh"

namespace flashvar::sm90::gated_delta_rule {

using namespace flashvar::gated_delta_rule;  // what all architectures share

// Operands in shared memory, of 64 rows in column blocks of 64 columns: their rows, or their
// columns, are k.
using RowsAsK = MnMajor<Tile64::kColBlockBytes>;
using ColumnsAsK = KMajor<Tile64::kColBlockBytes>;

// The two mbarriers of a buffer: full = it is written, empty = all readers have released it.
struct BarrierPair {
  uint32_t full;

  __device__ __forceinline__ uint32_t empty() const { return full + 8; }

  // Called by one thread. `writers`, `readers`: arrivals that complete a phase.
  __device__ __forceinline__ void init(uint32_t writers, uint32_t readers) const {
    ptx::mbarrier_init(full, writers);
    ptx::mbarrier_init(empty(), readers);
  }
};

// Arrives once for the warp, after all of its lanes' accesses to shared memory.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  __syncwarp();  // all lanes have accessed the buffer
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Zeros shared memory whose column blocks are not all loaded (col_blocks_of). Called by all
// threads.
__device__ __forceinline__ void zero_shared(uint32_t base, uint32_t bytes) {
  for (uint32_t at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16) {
    ptx::shared_store(base + at, uint4{});
  }
  ptx::fence_async_proxy();  // orders the zeros before TMA's writes, and before reads of wgmma
}

// Coordinates of a sequence's rows in clipped tensor maps (clipped_map.h).
struct ClippedRows {
  int32_t shift, end, batch;

  __device__ __forceinline__ ClippedRows(const FwdProblem& problem, const Span& span, int32_t batch)
      : shift(problem.rows.seqlen - span.count), end(span.first + span.count), batch(batch) {}
  __device__ __forceinline__ ClippedRows(const FwdProblem& problem, const Work& work)
      : ClippedRows(problem, work.span, work.batch) {}

  // Starts loading `count` column blocks of a chunk's 64 rows, from row `row` of the sequence on.
  __device__ __forceinline__ void load(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                       int32_t count, int32_t column, int32_t row,
                                       uint32_t head) const {
    for (int32_t i = 0; i < count; ++i) {
      ptx::tma_load_5d(to + i * (kChunk * 128), &map, barrier, ptx::CacheHint::kNormal,
                       column + 64 * i, shift + row, static_cast<int32_t>(head), end, batch);
    }
  }
};

// Stores the warp's 16 rows of operand A, [V][16 kSteps columns], to a tile in column blocks of 64
// columns. `warpgroup`: which 64 rows of the tile.
template <int kRowBlockBytes, int kSteps>
__device__ __forceinline__ void store_operand(uint32_t to, const uint32_t (&a)[kSteps][4],
                                              int warpgroup) {
  int const lane_id = static_cast<int>(threadIdx.x) % 32;
  int const row = 64 * warpgroup + 16 * Lane().warp + lane_id % 16;
  uint32_t const first = to + row * 128 + (lane_id / 16 ^ (row & 7)) * 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::stmatrix_x4((first ^ (step % 4 * 32)) + step / 4 * kRowBlockBytes, a[step]);
  }
}

// d = A L^T, or with kTransposed d = A L; with kAdd, d += instead. A is in registers, L a Triangle
// in shared memory. Each half of 32 columns of d skips the k-steps where L is 0. Issues one wgmma
// group.
template <class Dtype, bool kTransposed, bool kAdd>
__device__ __forceinline__ void gemm_triangle(float (&d)[32], const uint32_t (&a)[4][4],
                                              uint32_t matrix) {
  uint64_t const base = ptx::wgmma_descriptor_64b(matrix);
  ptx::wgmma_fence_operand(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const first = kTransposed ? 2 * half : 0, last = kTransposed ? 3 : 2 * half + 1;
#pragma unroll
    for (int kk = first; kk <= last; ++kk) {
      // The step's rows of L, in the half's columns; or its columns, in the half's rows.
      int const bytes = half * Triangle::kColBlockBytes +
                        (kTransposed ? kk * 16 * Triangle::kRowBytes
                                     : kk / 2 * Triangle::kColBlockBytes + kk % 2 * 32);
      ptx::Wgmma<Dtype, 32>::template rs<kTransposed>(reinterpret_cast<float (&)[16]>(d[16 * half]),
                                                      a[kk], ptx::wgmma_advance(base, bytes),
                                                      kAdd || kk > first);
    }
  }
  ptx::wgmma_commit();
}

}  // namespace flashvar::sm90::gated_delta_rule
