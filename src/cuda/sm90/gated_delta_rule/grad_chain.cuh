// What both chains of the backward share: a warpgroup with 64 columns of the state of one head in
// registers, and one whose warps load and store for it. Two blocks share an SM, so that one's
// products run beside the other's arithmetic.
#pragma once
#include <cstdint>

#include "core/smem_layout.cuh"
#include "gated_delta_rule/grad_chain.cuh"
#include "ptx/bulk.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/gated_delta_rule/chain.cuh"
#include "sm90/gemm.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::gated_delta_rule {

struct ChainArgs {
  BwdProblem problem;
  GradWorkspace workspace;
  CUtensorMap q, k, v, grad_out;  // clipped at the end of a sequence
};

inline constexpr int kStateThreads = 128;
inline constexpr uint32_t kStateWarps = kStateThreads / 32;
inline constexpr int kChainThreads = 2 * kStateThreads;  // the state's warpgroup, and the copies'
inline constexpr int kStateRegisters = 224, kCopyRegisters = 32;

// Bytes that each of an SM's two blocks may have: a block takes 1 KiB more than its own.
template <class Target>
constexpr int kHalfSharedMemory = (Target::kSharedMemory + 1024) / 2 - 1024;

// What the copies' warps know.
struct ChainCopies {
  const ChainArgs& args;
  const Work& work;
  ClippedRows rows;
  int32_t keys;  // column blocks of K and of Q

  __device__ __forceinline__ ChainCopies(const ChainArgs& args, const Work& work)
      : args(args),
        work(work),
        rows(args.problem, work),
        keys(col_blocks_of(args.problem.head_dim)) {}

  __device__ __forceinline__ const GradRecord& record(int32_t row) const {
    return args.workspace
        .records[(work.first_chunk + row / kChunk) * args.problem.heads + work.head];
  }
};

// A tile that the state's warps leave in shared memory, and that one of the copies' warps stores.
struct Leaving {
  Handover place;
  uint32_t tile;

  // The state's warps: an image's rows.
  template <int kSteps>
  __device__ __forceinline__ void put(const uint32_t (&a)[kSteps][4], uint32_t phase) const {
    ptx::mbarrier_wait(place.empty(), phase ^ 1);  // the last one has been read
    store_operand<kSquareBytes>(tile, a, 0);
  }
  __device__ __forceinline__ void send() const {
    ptx::fence_async_proxy();  // bulk copies read it
    warp_arrive(place.full);
  }

  // One lane, always the same: starts to store an image.
  __device__ __forceinline__ void start(unsigned char* image, uint32_t bytes,
                                        uint32_t phase) const {
    ptx::mbarrier_wait(place.full, phase);  // the image is there
    ptx::bulk_store(image, tile, bytes);
    ptx::bulk_commit();
  }
};

// d -= M d', of each of the accumulators' rows: M is X o D, or with kTransposed its transpose, and
// d' d with columns scaled by beta. `matrix` is the record's in shared memory, overwritten in
// careful chunks, which all threads of the warpgroup know. `beside` runs beside the product; when
// solve() returns no wgmma is in flight.
template <bool kTransposed, class Beside>
__device__ __forceinline__ void solve(float (&d)[32], const GradRecord& record, uint32_t matrix,
                                      uint32_t beta, bool careful, Beside beside) {
  using Matrix = typename Select<kTransposed, MnMajor<kSquareBytes>, KMajor<kSquareBytes>>::type;
  float scaled[32], product[32], undo[2];
#pragma unroll
  for (int i = 0; i < 32; ++i) scaled[i] = d[i];
  TokenFactors(beta).scale(scaled);
  uint32_t packed[4][4];
  pack_scaled(packed, scaled, undo);
  gemm_rs<dtype::fp16, 64, 4, Matrix, false>(product, packed, Matrix(matrix));
  beside();
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(product);
  if (careful) {
    ptx::named_barrier_sync(1, kStateThreads);  // the matrix has been read
    const auto* const low = reinterpret_cast<const uint4*>(record.inverse_low);
    for (int i = static_cast<int>(threadIdx.x); i < kSquareBytes / 16; i += kStateThreads) {
      uint4 const words = low[i];
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(matrix + 16 * i), "r"(words.x),
                   "r"(words.y), "r"(words.z), "r"(words.w)
                   : "memory");
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(1, kStateThreads);  // what is left of it is there
    gemm_rs<dtype::fp16, 64, 4>(product, packed, Matrix(matrix));
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(product);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) d[i] = fmaf(-undo[i / 2 % 2], product[i], d[i]);
}

}  // namespace flashvar::sm90::gated_delta_rule
