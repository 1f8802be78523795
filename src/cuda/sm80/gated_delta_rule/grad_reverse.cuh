// One of the two chains of the backward: from the last chunk of a sequence to the first, with 64
// columns of the gradient of a head's state in registers, as in gated_delta_rule/chain_parts.cuh.
// Its formulas, R1 to R6, are in gated_delta_rule/grad_chain_parts.cuh. It writes dV, and dS^T
// after each chunk.
#pragma once
#include <cstdint>

#include "ptx/movmatrix.cuh"
#include "ptx/vectors.cuh"
#include "sm80/gated_delta_rule/grad_chain_parts.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype_, int kDim_>
struct ReverseConfig {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  using Tile = SmemLayout<kChunk, kDim>;

  // A stage: K, X o D, P, dOut, vectors.
  static constexpr int kSolution = Tile::kBytes;
  static constexpr int kScores = kSolution + Triangle::kBytes;
  static constexpr int kGradOut = kScores + Triangle::kBytes;
  static constexpr int kVectors = kGradOut + kTile64Bytes;
  static constexpr int kStageBytes = kVectors + kChainVectorBytes;
  // After the two stages: Q.
  static constexpr int kQ = 2 * kStageBytes;
  static constexpr int kSharedMemory = kQ + Tile::kBytes;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// Stores the transpose of operand A, the warp's 16 columns, to a tile [token][column of V].
__device__ __forceinline__ void put_operand(uint32_t tile, const uint32_t (&a)[4][4]) {
  Lane const lane;
  // Address for token g and the warp's first 8 columns; its other 8 are one unit further.
  uint32_t const first = tile + Tile64::unit_offset(lane.g, 2 * lane.warp) + 4 * lane.t;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::shared_store(Tile64::advance(first, half) + 8 * n * Tile64::kRowBytes,
                        ptx::movmatrix_trans(a[n / 2][n % 2 * 2 + half]));
    }
  }
}

// Starts the loads of a chunk, as two cp.async groups: its stage; Q. Those of chunks before the
// first are empty.
template <class Config>
struct ReverseLoads : ChainLoads {
  __device__ __forceinline__ unsigned char* stage(int32_t chunk) const {
    return shared + (chunk & 1) * Config::kStageBytes;
  }

  __device__ __forceinline__ void start(int32_t row, unsigned char* stage) const {
    if (row >= 0) {
      load_keys<typename Config::Tile>(stage, problem.k, row);
      load_values(stage + Config::kGradOut, problem.grad_out, row);
      const GradRecord& from = record(row);
      uint32_t const to = ptx::smem_address(stage);
      copy_async(to + Config::kSolution, from.solution, 2 * Triangle::kBytes);
      copy_async(to + Config::kVectors, from.a, kChainVectorBytes);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void start_queries(int32_t row) const {
    if (row >= 0) load_keys<typename Config::Tile>(shared + Config::kQ, problem.q, row);
    ptx::cp_async_commit();
  }
};

// The chain of 64 columns of V. The steps from dV on are written out: as functions they change the
// order of its instructions.
template <class Config>
__device__ __forceinline__ void compute_grad_states(const BwdProblem& problem,
                                                    const GradWorkspace& workspace,
                                                    const Work& work, unsigned char* shared) {
  using Dtype = typename Config::Dtype;
  using Tile = typename Config::Tile;
  constexpr int kDim = Config::kDim;
  ReverseLoads<Config> const loads{{problem, workspace, work, shared}};
  int32_t const last = last_chunk(work);
  loads.start(last, loads.stage(last / kChunk));
  loads.start_queries(last);

  float grad[kDim / 2] = {};
  load_state<kDim>(problem, problem.grad_final_state, work, work.column, grad);
  for (int32_t row = last; row >= 0; row -= kChunk) {
    uint32_t const tiles = ptx::smem_address(loads.stage(row / kChunk));
    uint32_t const vectors = tiles + Config::kVectors, tile_out = tiles + Config::kGradOut;
    uint32_t const tile_q = ptx::smem_address(shared + Config::kQ);
    ptx::cp_async_wait<1>();
    __syncthreads();  // the stage is loaded; all warps have read the other stage
    loads.start(row - kChunk, loads.stage(row / kChunk + 1));

    TileIndices const indices(problem, work, workspace.tiles, row);
    uint32_t packed_grad[kDim / 16][4];
    pack<Dtype>(packed_grad, grad);
    store_image(indices.grad_state(workspace), packed_grad);
    uint16_t* const low = indices.grad_values_low(workspace);
    float const growth = ptx::shared_load_unordered<float>(vectors + Vectors::growth);
    if (growth > kMaxGradGrowth) {
      ptx::cp_async_wait<1>();
      __syncthreads();  // Q is loaded
      gradients_by_tokens<Dtype, kDim>(problem, work, grad, tiles, tile_q, tile_out, row,
                                       [&](int token, int half, float x) {
                                         put_grad_value<Dtype>(tile_out, token, half, x, low);
                                       });
      __syncthreads();  // all warps have read Q, which the next load overwrites
      loads.start_queries(row - kChunk);
      copy_out(problem, problem.grad_v, work, tile_out, row, work.column);
      continue;
    }
    bool const careful = growth > kCarefulGrowth;
    float d[32];  // dS^T K^T, then dU^T, then dV^T
    uint32_t packed_out[4][4], packed[4][4];
    multiply_registers<Dtype, Tile, false, false>(d, packed_grad, tiles);  // (R1)
    TokenFactors(vectors + Vectors::b).scale(d);                           // (R2)
    load_transposed(packed_out, tile_out);
    multiply_registers<Dtype, Triangle, true, true>(d, packed_out, tiles + Config::kScores);
    // (R3)
    solve<true>(d, workspace.records[indices.record], tiles + Config::kSolution,
                vectors + kVectorBeta, careful);
    TokenFactors(vectors + kVectorBeta).scale(d);
    __syncwarp();  // all lanes have read the warp's columns of dOut, which dV overwrites
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
    scale_operand<Dtype>(packed_out, vectors + Vectors::c);  // (R5), its operand
    decay_state(grad, ptx::shared_load_unordered<float>(vectors + Vectors::decay));  // (R4)
    multiply_registers<Dtype, Tile, true, true>(grad, packed, tiles);                // (R6)
    ptx::cp_async_wait<1>();
    __syncthreads();                                                        // Q is loaded
    multiply_registers<Dtype, Tile, true, true>(grad, packed_out, tile_q);  // (R5)
    __syncthreads();  // all warps have read Q, which the next load overwrites
    loads.start_queries(row - kChunk);
  }
  store_state<kDim>(problem, problem.grad_initial_state, work, work.column, grad);
}

}  // namespace flashvar::sm80::gated_delta_rule
