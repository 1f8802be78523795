// What both chains of the backward share. One warpgroup holds 64 columns of the state of one head,
// or of its gradient, in registers; one lane of another issues loads; images are staged in shared
// memory and stored with bulk copies. Two blocks share an SM, so that the GEMMs of one overlap with
// the arithmetic of the other.
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
inline constexpr int kChainThreads =
    2 * kStateThreads;  // the state warpgroup, and the one that loads
inline constexpr int kStateRegisters = 232, kLoadRegisters = 24;

// Shared memory of each of an SM's two blocks: the system reserves 1 KiB for every block.
template <class Target>
constexpr int kHalfSharedMemory = (Target::kSharedMemory + 1024) / 2 - 1024;

// What the loading lane needs to locate a chunk's operands.
struct GradLoads {
  const ChainArgs& args;
  const Work& work;
  ClippedRows rows;
  int32_t keys;  // column blocks of K and of Q that are loaded

  __device__ __forceinline__ GradLoads(const ChainArgs& args, const Work& work)
      : args(args),
        work(work),
        rows(args.problem, work),
        keys(col_blocks_of(args.problem.head_dim)) {}

  __device__ __forceinline__ const GradRecord& record(int32_t row) const {
    return args.workspace
        .records[(work.first_chunk + row / kChunk) * args.problem.heads + work.head];
  }
};

// Stores images of 64 rows to the workspace, staged in shared memory, with bulk copies. Each warp
// copies its own 16 rows of every column block, which are contiguous, so that no warp waits for
// another. Lane 0 issues the warp's copies and owns their bulk groups.
template <int kColBlocks>
struct ImageStore {
  uint32_t staging;

  // Stages operand A, once all but the kPending newest bulk groups have read shared memory.
  template <int kPending>
  __device__ __forceinline__ void put(const uint32_t (&a)[4 * kColBlocks][4]) const {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<kPending>();
    __syncwarp();  // the staging buffer is free for all lanes
    store_operand<kSquareBytes>(staging, a, 0);
  }

  __device__ __forceinline__ void send(unsigned char* image) const {
    constexpr int kWarpBytes = kSquareBytes / kStateWarps;
    ptx::fence_async_proxy();  // bulk copies read the rows
    __syncwarp();              // all lanes have written the warp's rows
    if (threadIdx.x % 32 == 0) {
      uint32_t const first = threadIdx.x / 32 * kWarpBytes;
#pragma unroll
      for (int block = 0; block < kColBlocks; ++block) {
        uint32_t const at = first + block * kSquareBytes;
        ptx::bulk_store(image + at, staging + at, kWarpBytes);
      }
      ptx::bulk_commit();
    }
  }
};

// d -= M d', for each row of the accumulators: M is X o D, or with kTransposed its transpose; d' is
// d with columns scaled by beta. `matrix`: X o D in shared memory. In careful chunks it is
// overwritten with its low part, for a second product; `careful` is the same in all threads of the
// warpgroup. `beside()` is executed while the first product runs. Postcondition: no wgmma is in
// flight.
template <bool kTransposed, class Beside>
__device__ __forceinline__ void solve(float (&d)[32], const GradRecord& record, uint32_t matrix,
                                      uint32_t beta, bool careful, Beside beside) {
  using Matrix = typename Select<kTransposed, MnMajor<kSquareBytes>, KMajor<kSquareBytes>>::type;
  float product[32], undo[2];
  uint32_t packed[4][4];
  start_solve(packed, undo, d, beta);
  gemm_rs<dtype::fp16, 64, 4, Matrix, false>(product, packed, Matrix(matrix));
  beside();
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(product);
  if (careful) {
    ptx::named_barrier_sync(1, kStateThreads);  // all warps' products have read the high part
    copy_inverse_low<kStateThreads>(matrix, record);
    ptx::fence_async_proxy();                   // wgmma reads the low part
    ptx::named_barrier_sync(1, kStateThreads);  // all warps have written the low part
    gemm_rs<dtype::fp16, 64, 4>(product, packed, Matrix(matrix));
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(product);
  }
  finish_solve(d, product, undo);
}

}  // namespace flashvar::sm90::gated_delta_rule
