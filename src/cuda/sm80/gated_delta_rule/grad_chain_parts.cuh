// Parts of both chains of the backward on sm80: loads of chunks, and solve().
#pragma once
#include <cstdint>

#include "gated_delta_rule/grad_chain_parts.cuh"
#include "gated_delta_rule/grad_chunk.h"
#include "gated_delta_rule/grad_tokens.cuh"
#include "sm80/gated_delta_rule/chunk_loads.cuh"
#include "sm80/gated_delta_rule/fwd.cuh"

namespace flashvar::sm80::gated_delta_rule {

inline constexpr int kChainThreads = 128;

// Loads of a chunk's operands, by all threads of a block.
struct ChainLoads {
  const BwdProblem& problem;
  const GradWorkspace& workspace;
  const Work& work;
  unsigned char* shared;

  __device__ __forceinline__ const GradRecord& record(int32_t row) const {
    return workspace.records[TileIndices(problem, work, workspace.tiles, row).record];
  }
  // All columns of K or Q.
  template <class Tile>
  __device__ __forceinline__ void load_keys(unsigned char* to, const Tensor& from,
                                            int32_t row) const {
    load_rows<Tile, kChainThreads>(to, from, {work, row}, work.head_qk, 0, problem.head_dim);
  }
  // The chain's columns of V or dOut.
  __device__ __forceinline__ void load_values(unsigned char* to, const Tensor& from,
                                              int32_t row) const {
    load_rows<Tile64, kChainThreads>(to, from, {work, row}, work.head, work.column,
                                     problem.head_dim_v - work.column);
  }
};

// d -= L d', for each row of the accumulators: L is X o D, or with kTransposed its transpose; d' is
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
    copy_solution_low(matrix, record, kChainThreads);
    __syncthreads();  // the low part is written
    multiply_registers<dtype::fp16, Triangle, kTransposed, true>(product, packed, matrix);
  }
  finish_solve(d, product, descale);
}

}  // namespace flashvar::sm80::gated_delta_rule
