// The reverse chain of the backward for head dims above 128, in the 99 KB of shared memory of
// compute capability 8.6. As in fwd_large_dim.cuh, there are two tiles for K and Q, and each chunk
// swaps them. dS^T is multiplied by K^T first. Right after that the product with Q is added to it,
// and the next chunk's K is loaded over Q.
#pragma once
#include <cstdint>

#include "ptx/vectors.cuh"
#include "sm80/gated_delta_rule/grad_reverse.cuh"
#include "sm80/gated_delta_rule/state_large_dim.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype_, int kDim_>
struct LargeDimReverseConfig {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  using Tile = SmemLayout<kChunk, kDim>;

  // The two tiles; two of dOut, and of vectors; one of each matrix.
  static constexpr int kGradOut = 2 * Tile::kBytes;
  static constexpr int kVectors = kGradOut + 2 * kTile64Bytes;
  static constexpr int kSolution = kVectors + 2 * kChainVectorBytes;
  static constexpr int kScores = kSolution + Triangle::kBytes;
  static constexpr int kSharedMemory = kScores + Triangle::kBytes;
  static_assert(kSolution % 128 == 0, "rows of matrices");
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// Starts the loads of a chunk, as two cp.async groups: K, P, dOut and the vectors; Q and X o D.
// Those of chunks before the first are empty.
template <class Config>
struct LargeDimReverseLoads : ChainLoads {
  // Offset of a chunk's buffer among two of `bytes` bytes.
  static __device__ __forceinline__ int buffer(int32_t row, int bytes) {
    return (row / kChunk & 1) * bytes;
  }
  static __device__ __forceinline__ int tile_k(int32_t row) {
    return buffer(row, Config::Tile::kBytes);
  }
  static __device__ __forceinline__ int tile_q(int32_t row) { return tile_k(row + kChunk); }
  static __device__ __forceinline__ int tile_out(int32_t row) {
    return Config::kGradOut + buffer(row, kTile64Bytes);
  }
  static __device__ __forceinline__ int vectors(int32_t row) {
    return Config::kVectors + buffer(row, kChainVectorBytes);
  }

  __device__ __forceinline__ void start_keys(int32_t row) const {
    if (row >= 0) {
      load_keys<typename Config::Tile>(shared + tile_k(row), problem.k, row);
      load_values(shared + tile_out(row), problem.grad_out, row);
      const GradRecord& from = record(row);
      uint32_t const to = ptx::smem_address(shared);
      copy_async(to + Config::kScores, from.scores, Triangle::kBytes);
      copy_async(to + vectors(row), from.a, kChainVectorBytes);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void start_queries(int32_t row) const {
    if (row >= 0) {
      load_keys<typename Config::Tile>(shared + tile_q(row), problem.q, row);
      copy_async(ptx::smem_address(shared) + Config::kSolution, record(row).solution,
                 Triangle::kBytes);
    }
    ptx::cp_async_commit();
  }
};

// As compute_grad_states() of grad_reverse.cuh. It writes out the same steps, for the same reason.
template <class Config>
__device__ __forceinline__ void compute_grad_states_large_dim(const BwdProblem& problem,
                                                              const GradWorkspace& workspace,
                                                              const Work& work,
                                                              unsigned char* shared) {
  using Dtype = typename Config::Dtype;
  using Tile = typename Config::Tile;
  constexpr int kDim = Config::kDim;
  LargeDimReverseLoads<Config> const loads{{problem, workspace, work, shared}};
  int32_t const last = last_chunk(work);
  loads.start_keys(last);
  loads.start_queries(last);

  float grad[kDim / 2] = {};
  load_state<kDim>(problem, problem.grad_final_state, work, work.column, grad);
  uint32_t const base = ptx::smem_address(shared);
  for (int32_t row = last; row >= 0; row -= kChunk) {
    uint32_t const tile_k = base + loads.tile_k(row), tile_q = base + loads.tile_q(row);
    uint32_t const tile_out = base + loads.tile_out(row), vectors = base + loads.vectors(row);
    TileIndices const indices(problem, work, workspace.tiles, row);
    store_state_image<Dtype>(indices.grad_state(workspace), grad);
    uint16_t* const low = indices.grad_values_low(workspace);
    ptx::cp_async_wait<1>();
    __syncthreads();  // all but Q and X o D is loaded
    float const growth = ptx::shared_load_unordered<float>(vectors + Vectors::growth);
    if (growth > kMaxGradGrowth) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // Q is loaded
      gradients_by_tokens<Dtype, kDim>(problem, work, grad, tile_k, tile_q, tile_out, row,
                                       [&](int token, int half, float x) {
                                         put_grad_value<Dtype>(tile_out, token, half, x, low);
                                       });
      __syncthreads();  // all warps have read K and Q, which the next loads overwrite
      loads.start_keys(row - kChunk);
      loads.start_queries(row - kChunk);
      copy_out(problem, problem.grad_v, work, tile_out, row, work.column);
      continue;
    }
    bool const careful = growth > kCarefulGrowth;
    float d[32];                                   // dS^T K^T, then dU^T, then dV^T
    multiply_state<Dtype, Tile>(d, grad, tile_k);  // (R1)
    uint32_t packed[4][4];                         // dOut; later operands made of dV
    TokenFactors(vectors + Vectors::b).scale(d);   // (R2)
    load_transposed(packed, tile_out);
    multiply_registers<Dtype, Triangle, true, true>(d, packed, base + Config::kScores);
    scale_operand<Dtype>(packed, vectors + Vectors::c);  // (R5), its operand
    decay_state(grad, ptx::shared_load_unordered<float>(vectors + Vectors::decay));  // (R4)
    ptx::cp_async_wait<0>();
    __syncthreads();                                                    // Q and X o D are loaded
    multiply_registers<Dtype, Tile, true, true>(grad, packed, tile_q);  // (R5)
    __syncthreads();  // all warps have read Q and P, which the next loads overwrite
    loads.start_keys(row - kChunk);
    // (R3)
    solve<true>(d, workspace.records[indices.record], base + Config::kSolution,
                vectors + kVectorBeta, careful);
    TokenFactors(vectors + kVectorBeta).scale(d);
    pack<Dtype>(packed, d);
    put_operand(tile_out, packed);
    copy_out(problem, problem.grad_v, work, tile_out, row, work.column);
    if (careful) {
      __syncwarp();  // all lanes have copied dV out of the tile
      pack_low<Dtype>(packed, d);
      put_operand(tile_out, packed);
      copy_columns(low, kChainColumns, tile_out, kChunk, kChainColumns);
    }
    TokenFactors(vectors).scale(d);  // (R6), its operand
#pragma unroll
    for (float& value : d) value = -value;
    pack<Dtype>(packed, d);
    multiply_registers<Dtype, Tile, true, true>(grad, packed, tile_k);  // (R6)
    __syncthreads();  // all warps have read K and X o D, which the next loads overwrite
    loads.start_queries(row - kChunk);
  }
  store_state<kDim>(problem, problem.grad_initial_state, work, work.column, grad);
}

}  // namespace flashvar::sm80::gated_delta_rule
