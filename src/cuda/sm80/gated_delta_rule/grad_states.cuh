// One of the two chains of the backward: recomputes the forward's and writes, instead of out, the
// state before each chunk and the residuals R (grad_chunk.h).
#pragma once
#include <cstdint>

#include "gated_delta_rule/large_dim.h"
#include "ptx/vectors.cuh"
#include "sm80/gated_delta_rule/grad_chain_parts.cuh"
#include "sm80/gated_delta_rule/state_large_dim.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype_, int kDim_>
struct StatesConfig {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  using Tile = SmemLayout<kChunk, kDim>;

  // A stage: K, X o D, V, vectors.
  static constexpr int kSolution = Tile::kBytes;
  static constexpr int kV = kSolution + Triangle::kBytes;
  static constexpr int kVectors = kV + kTile64Bytes;
  static constexpr int kStageBytes = kVectors + kChainVectorBytes;
  static constexpr int kSharedMemory = 2 * kStageBytes;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// Starts the loads of a chunk, as one cp.async group. That of chunks past the last is empty.
template <class Config>
struct StatesLoads : ChainLoads {
  __device__ __forceinline__ unsigned char* stage(int32_t chunk) const {
    return shared + chunk % 2 * Config::kStageBytes;
  }

  __device__ __forceinline__ void start(int32_t row, unsigned char* stage) const {
    if (row < work.span.count) {
      load_keys<typename Config::Tile>(stage, problem.k, row);
      load_values(stage + Config::kV, problem.v, row);
      const GradRecord& from = record(row);
      uint32_t const to = ptx::smem_address(stage);
      copy_async(to + Config::kSolution, from.solution, Triangle::kBytes);
      copy_async(to + Config::kVectors, from.a, kChainVectorBytes);
    }
    ptx::cp_async_commit();
  }
};

// The chain of 64 columns of V.
template <class Config>
__device__ __forceinline__ void compute_states(const BwdProblem& problem,
                                               const GradWorkspace& workspace, const Work& work,
                                               unsigned char* shared) {
  using Dtype = typename Config::Dtype;
  using Tile = typename Config::Tile;
  constexpr int kDim = Config::kDim;
  StatesLoads<Config> const loads{{problem, workspace, work, shared}};
  loads.start(0, shared);

  float state[kDim / 2] = {};
  load_state<kDim>(problem, problem.initial_state, work, work.column, state);
  for (int32_t row = 0; row < work.span.count; row += kChunk) {
    unsigned char* const stage = loads.stage(row / kChunk);
    uint32_t const tiles = ptx::smem_address(stage), vectors = tiles + Config::kVectors;
    ptx::cp_async_wait<0>();
    __syncthreads();  // the chunk is loaded; all warps have read the other stage
    loads.start(row + kChunk, loads.stage(row / kChunk + 1));

    TileIndices const indices(problem, work, workspace.tiles, row);
    uint32_t packed_state[kLargeDim<kDim> ? 1 : kDim / 16][4];
    unsigned char* const state_image = indices.state(workspace);
    if constexpr (kLargeDim<kDim>) {
      store_state_image<Dtype>(state_image, state);
    } else {
      pack<Dtype>(packed_state, state);
      store_image(state_image, packed_state);
    }
    unsigned char* const image = workspace.residuals + indices.tile * kTile64Bytes;
    unsigned char* const image_low = workspace.residuals_low + indices.tile * kTile64Bytes;
    float const growth = ptx::shared_load_unordered<float>(vectors + Vectors::growth);
    if (growth > kMaxGradGrowth) {
      residuals_by_tokens<Dtype, kDim>(problem, work, state, tiles, tiles + Config::kV, row,
                                       [&](int token, int half, float x) {
                                         put_element<Dtype>(image, token, half, x, image_low);
                                       });
      continue;
    }
    float residual[32];
    if constexpr (kLargeDim<kDim>) {
      multiply_state<Dtype, Tile>(residual, state, tiles);
    } else {
      multiply_registers<Dtype, Tile, false, false>(residual, packed_state, tiles);
    }
    ValueTile(tiles + Config::kV).subtract<Dtype>(residual, TokenFactors(vectors));  // (S1)
    // (S2)
    solve<false>(residual, workspace.records[indices.record], tiles + Config::kSolution,
                 vectors + kVectorBeta, growth > kCarefulGrowth);
    uint32_t packed[4][4];
    pack<Dtype>(packed, residual);
    store_image(image, packed);
    if (growth > kCarefulGrowth) {
      pack_low<Dtype>(packed, residual);
      store_image(image_low, packed);
    }
    TokenFactors(vectors + kVectorBeta).scale(residual);  // (S3)
    TokenFactors(vectors + Vectors::b).scale(residual);
    pack<Dtype>(packed, residual);
    decay_state(state, ptx::shared_load_unordered<float>(vectors + Vectors::decay));
    multiply_registers<Dtype, Tile, true, true>(state, packed, tiles);
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
