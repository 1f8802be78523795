// One of the two chains of the backward: recomputes the forward's and writes, instead of out, the
// state before each chunk and the residuals R (grad_chunk.h).
#pragma once
#include <cstdint>

#include "sm80/gated_delta_rule/grad_chain.cuh"
#include "sm80/gated_delta_rule/wide_state.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype_, int kDim_>
struct StatesConfig {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  using Tile = SmemLayout<kChunk, kDim>;

  // A stage: K, X o D, V, vectors.
  static constexpr int kInverse = Tile::kBytes;
  static constexpr int kV = kInverse + Triangle::kBytes;
  static constexpr int kVectors = kV + kSquareBytes;
  static constexpr int kStageBytes = kVectors + kChainVectorBytes;
  static constexpr int kSharedMemory = 2 * kStageBytes;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// The chain of 64 columns of V.
template <class Config>
__device__ __forceinline__ void compute_states(const FwdProblem& problem,
                                               const GradWorkspace& workspace, const Work& work,
                                               unsigned char* shared) {
  using Dtype = typename Config::Dtype;
  using Tile = typename Config::Tile;
  constexpr int kDim = Config::kDim;
  constexpr bool kWide = kDim > kMaxPackedDim;
  auto start = [&](int32_t row, unsigned char* stage) {
    if (row < work.span.count) {
      load_rows<Tile, kChainThreads>(stage, problem.k, {work, row}, work.head_qk, 0,
                                     problem.head_dim);
      load_rows<Square, kChainThreads>(stage + Config::kV, problem.v, {work, row}, work.head,
                                       work.column, problem.head_dim_v);
      TileIndices const indices(problem, work, workspace.tiles, row);
      const GradRecord& record = workspace.records[indices.record];
      uint32_t const to = ptx::smem_address(stage);
      copy_async(to + Config::kInverse, record.inverse, Triangle::kBytes);
      copy_async(to + Config::kVectors, record.a, kChainVectorBytes);
    }
    ptx::cp_async_commit();
  };
  start(0, shared);

  float state[kDim / 2] = {};
  if (problem.initial_state.data != nullptr) {
    for_each_state_element<kDim>(problem, problem.initial_state, work, work.column,
                                 [&](int i, const float* from) { state[i] = *from; });
  }
  for (int32_t row = 0; row < work.span.count; row += kChunk) {
    unsigned char* const stage = shared + row / kChunk % 2 * Config::kStageBytes;
    uint32_t const tiles = ptx::smem_address(stage), vectors = tiles + Config::kVectors;
    ptx::cp_async_wait<0>();
    __syncthreads();  // the chunk is loaded; all warps have read the other stage
    start(row + kChunk, shared + (row / kChunk + 1) % 2 * Config::kStageBytes);

    TileIndices const indices(problem, work, workspace.tiles, row);
    uint32_t packed_state[kWide ? 1 : kDim / 16][4];
    unsigned char* const state_image = workspace.states + indices.tile * workspace.state_bytes;
    if constexpr (kWide) {
      store_state_image<Dtype>(state_image, state);
    } else {
      pack<Dtype>(packed_state, state);
      store_image(state_image, packed_state);
    }
    unsigned char* const image = workspace.residuals + indices.tile * kSquareBytes;
    unsigned char* const image_low = workspace.residuals_low + indices.tile * kSquareBytes;
    float const growth = load_float(vectors + Vectors::growth);
    if (growth > kMaxGradGrowth) {
      residuals_by_tokens<Dtype, kDim>(problem, work, state, tiles, tiles + Config::kV, row,
                                       [&](int token, int half, float x) {
                                         put_element<Dtype>(image, token, half, x, image_low);
                                       });
      continue;
    }
    float residual[32];
    if constexpr (kWide) {
      multiply_state<Dtype, Tile>(residual, state, tiles);
    } else {
      multiply_registers<Dtype, Tile, false, false>(residual, packed_state, tiles);
    }
    ValueTile(tiles + Config::kV).subtract<Dtype>(residual, TokenFactors(vectors));
    solve<false>(residual, workspace.records[indices.record], tiles + Config::kInverse,
                 vectors + kVectorBeta, growth > kCarefulGrowth);
    uint32_t packed[4][4];
    pack<Dtype>(packed, residual);
    store_image(image, packed);
    if (growth > kCarefulGrowth) {
      pack_low<Dtype>(packed, residual);
      store_image(image_low, packed);
    }
    TokenFactors(vectors + kVectorBeta).scale(residual);
    TokenFactors(vectors + Vectors::b).scale(residual);
    pack<Dtype>(packed, residual);
    float const decay = load_float(vectors + Vectors::decay);
#pragma unroll
    for (float& value : state) value *= decay;
    multiply_registers<Dtype, Tile, true, true>(state, packed, tiles);
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
