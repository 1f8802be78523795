// Parts of both chains of the backward. One or two warpgroups hold 64 columns each of the state
// of one head, or of its gradient, in registers; one lane of another issues loads; images are
// staged in shared memory and stored with bulk copies. With enough blocks two share an SM, so that
// the GEMMs of one overlap with the arithmetic of the other; otherwise a block has an SM to itself,
// and loads further ahead.
#pragma once
#include <cstdint>

#include "core/smem_layout.cuh"
#include "gated_delta_rule/grad_chain_parts.cuh"
#include "gated_delta_rule/grad_segments.h"
#include "gated_delta_rule/segment_work.cuh"
#include "ptx/bulk.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/gated_delta_rule/chain_parts.cuh"
#include "sm90/gemm.cuh"
#include "sm90/pipeline.cuh"

namespace flashvar::sm90::gated_delta_rule {

struct ChainArgs {
  BwdProblem problem;
  GradWorkspace workspace;
  GradSegments grad_segments;
  CUtensorMap q, k, v, grad_out;            // clipped at the end of a sequence
  uint32_t value_tiles_128, key_tiles_128;  // tiles of kColumns128 columns of V and of K
};

// The extent of a chain: a whole sequence; a segment, from the state or gradient that is known
// where the chain begins; or (pass 1) an inner segment, from zeros: the chunks' results are not
// written.
enum class Extent { kSequence, kSegment, kInner };

// Columns of a block with two state warpgroups: 128.
inline constexpr int kColumns128 = 2 * kChainColumns;

inline constexpr int kStateThreads = 128;  // of a warpgroup
inline constexpr uint32_t kStateWarps = kStateThreads / 32;
// State warpgroups, of which a chain may use one, and the one that loads.
template <Extent kExtent>
constexpr int kChainThreads = (kExtent == Extent::kSequence ? 2 : 3) * kStateThreads;
// setmaxnreg split, in registers per thread; the sums are those at kernel entry. Where two blocks
// share an SM: 232 + 24 = 2 * 128. Where a block has it to itself: 2 * 240 + 24 = 3 * 168.
inline constexpr int kLoadRegisters = 24;
template <Extent kExtent>
constexpr int kStateRegisters = kExtent == Extent::kSequence ? 232 : 240;
// Named barrier of the state warpgroups, in solve().
inline constexpr uint32_t kSolveBarrier = 1;

// The coordinates by which the loading lane locates a chunk's operands.
struct GradLoads {
  const ChainArgs& args;
  const Work& work;
  ClippedRows rows;
  int32_t keys;    // column blocks of K and of Q that are loaded
  int32_t values;  // of V or dOut; 0: of a transition, which takes V = 0

  __device__ __forceinline__ GradLoads(const ChainArgs& args, const Work& work, int32_t values)
      : args(args),
        work(work),
        rows(args.problem, work),
        keys(col_blocks_of(args.problem.head_dim)),
        values(values) {}

  __device__ __forceinline__ const GradRecord& record(int32_t row) const {
    return args.workspace
        .records[(work.first_chunk + row / kChunk) * args.problem.heads + work.head];
  }
};

// Loads the gradient of the state after the chain's last chunk.
template <int kDim, Extent kExtent>
__device__ __forceinline__ void load_last_gradient(const ChainArgs& args, const SegmentWork& work,
                                                   float (&grad)[kDim / 2]) {
  const BwdProblem& problem = args.problem;
#pragma unroll
  for (float& value : grad) value = 0.f;
  if constexpr (kExtent == Extent::kInner) return;
  if (kExtent == Extent::kSequence || work.after < 0) {
    load_state<kDim>(problem, problem.grad_final_state, work, work.column, grad);
  } else {
    ptx::griddepcontrol_wait();  // pass 2 has written the gradients
    for_each_pair<kDim>(args.grad_segments.grads.states, work.after, work.head, work.column,
                        problem.head_dim_v, [&](int i, const float2* from) {
                          grad[i] = from->x;
                          grad[i + 1] = from->y;
                        });
  }
}

// Stores the gradient of the state before the chain's first chunk: the caller's, or in pass 1 that
// for pass 2. In pass 3 pass 2 has stored it.
template <int kDim, Extent kExtent>
__device__ __forceinline__ void store_first_gradient(const ChainArgs& args, const SegmentWork& work,
                                                     const float (&grad)[kDim / 2]) {
  const BwdProblem& problem = args.problem;
  if (kExtent != Extent::kInner && work.before < 0) {
    store_state<kDim>(problem, problem.grad_initial_state, work, work.column, grad);
  } else if (kExtent == Extent::kInner || work.after < 0) {
    for_each_pair<kDim>(args.grad_segments.grads.states, work.before, work.head, work.column,
                        problem.head_dim_v,
                        [&](int i, float2* to) { *to = {grad[i], grad[i + 1]}; });
  }
}

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
    store_operand<kTile64Bytes>(staging, a, 0);
  }

  __device__ __forceinline__ void send(unsigned char* image) const {
    constexpr int kWarpBytes = kTile64Bytes / kStateWarps;
    ptx::fence_async_proxy();  // bulk copies read the rows
    __syncwarp();              // all lanes have written the warp's rows
    if (threadIdx.x % 32 == 0) {
      uint32_t const first = Lane().warp * kWarpBytes;
#pragma unroll
      for (int block = 0; block < kColBlocks; ++block) {
        uint32_t const at = first + block * kTile64Bytes;
        ptx::bulk_store(image + at, staging + at, kWarpBytes);
      }
      ptx::bulk_commit();
    }
  }
};

// d -= L d', for each row of the accumulators: L is X o D, or with kTransposed its transpose; d' is
// d with columns scaled by beta. `matrix`: X o D in shared memory. In careful chunks it is
// overwritten with its low part, for a second product; `careful` is the same in all `threads`
// threads of the state warpgroups. `overlapped()` is executed while the first product runs.
// Postcondition: no wgmma is in flight.
template <bool kTransposed, class Overlapped>
__device__ __forceinline__ void solve(float (&d)[32], const GradRecord& record, uint32_t matrix,
                                      uint32_t beta, bool careful, uint32_t threads,
                                      Overlapped overlapped) {
  float product[32], descale[2];
  uint32_t packed[4][4];
  start_solve(packed, descale, d, beta);
  gemm_triangle<dtype::fp16, kTransposed, false>(product, packed, matrix);
  overlapped();
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(product);
  if (careful) {
    ptx::named_barrier_sync(kSolveBarrier, threads);  // all products have read the high part
    copy_solution_low(matrix, record, static_cast<int>(threads));
    ptx::fence_async_proxy();                         // wgmma reads the low part
    ptx::named_barrier_sync(kSolveBarrier, threads);  // all warps have written the low part
    gemm_triangle<dtype::fp16, kTransposed, true>(product, packed, matrix);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(product);
  }
  finish_solve(d, product, descale);
}

}  // namespace flashvar::sm90::gated_delta_rule
