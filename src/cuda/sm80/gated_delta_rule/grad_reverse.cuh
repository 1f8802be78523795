// One of the two chains of the backward: from the last chunk of a sequence to the first, with 64
// columns of the gradient of a head's state in registers, as in gated_delta_rule/chain.cuh:
//   dU^T = b o (dS^T K^T) + dOut^T P;  dV^T = beta o (dU^T - (beta o dU^T) (X o D))
//   dS^T = decay dS^T + (c o dOut^T) Q - (a o dV^T) K
// It writes dV, and dS^T after each chunk.
#pragma once
#include <cstdint>

#include "ptx/movmatrix.cuh"
#include "sm80/gated_delta_rule/grad_chain.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Target, class Dtype_, int kDim_>
struct ReverseConfig {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  using Tile = SmemLayout<kChunk, kDim>;

  // A stage: K, X o D, P, dOut, vectors.
  static constexpr int kInverse = Tile::kBytes;
  static constexpr int kScores = kInverse + Triangle::kBytes;
  static constexpr int kGradOut = kScores + Triangle::kBytes;
  static constexpr int kVectors = kGradOut + kSquareBytes;
  static constexpr int kStageBytes = kVectors + kChainVectorBytes;
  // After the two stages: Q.
  static constexpr int kQ = 2 * kStageBytes;
  static constexpr int kSharedMemory = kQ + Tile::kBytes;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// Stores the transpose of operand A, the warp's 16 columns, to a tile [token][column of V].
__device__ __forceinline__ void put_operand(uint32_t tile, const uint32_t (&a)[4][4]) {
  Lane const lane;
  // Address for token g and the warp's first 8 columns; its other 8 are one chunk further.
  uint32_t const first = tile + Square::chunk_offset(lane.g, 2 * lane.warp) + 4 * lane.t;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm volatile(
          "st.shared.u32 [%0], %1;" ::"r"(Square::advance(first, half) + 8 * n * Square::kRowBytes),
          "r"(ptx::movmatrix_trans(a[n / 2][n % 2 * 2 + half]))
          : "memory");
    }
  }
}

// The chain of 64 columns of V. Over 100 lines, because its steps share the accumulators and packed
// operands: with steps as functions the compiler allocates registers otherwise.
template <class Config>
__device__ __forceinline__ void compute_grad_states(const BwdProblem& problem,
                                                    const GradWorkspace& workspace,
                                                    const Work& work, unsigned char* shared) {
  using Dtype = typename Config::Dtype;
  using Tile = typename Config::Tile;
  constexpr int kDim = Config::kDim;
  auto start = [&](int32_t row, unsigned char* stage) {
    if (row >= 0) {
      load_rows<Tile, kChainThreads>(stage, problem.k, {work, row}, work.head_qk, 0,
                                     problem.head_dim);
      load_rows<Square, kChainThreads>(stage + Config::kGradOut, problem.grad_out, {work, row},
                                       work.head, work.column, problem.head_dim_v);
      TileIndices const indices(problem, work, workspace.tiles, row);
      const GradRecord& record = workspace.records[indices.record];
      uint32_t const to = ptx::smem_address(stage);
      copy_async(to + Config::kInverse, record.inverse, 2 * Triangle::kBytes);
      copy_async(to + Config::kVectors, record.a, kChainVectorBytes);
    }
    ptx::cp_async_commit();
  };
  auto start_q = [&](int32_t row) {
    if (row >= 0) {
      load_rows<Tile, kChainThreads>(shared + Config::kQ, problem.q, {work, row}, work.head_qk, 0,
                                     problem.head_dim);
    }
    ptx::cp_async_commit();
  };
  int32_t const last = (work.span.count + kChunk - 1) / kChunk * kChunk - kChunk;
  start(last, shared + (last / kChunk & 1) * Config::kStageBytes);
  start_q(last);

  float grad[kDim / 2] = {};
  if (problem.grad_final_state.data != nullptr) {
    for_each_state_element<kDim>(problem, problem.grad_final_state, work, work.column,
                                 [&](int i, const float* from) { grad[i] = *from; });
  }
  for (int32_t row = last; row >= 0; row -= kChunk) {
    unsigned char* const stage = shared + (row / kChunk & 1) * Config::kStageBytes;
    uint32_t const tiles = ptx::smem_address(stage), vectors = tiles + Config::kVectors;
    uint32_t const tile_q = ptx::smem_address(shared + Config::kQ);
    uint32_t const tile_out = tiles + Config::kGradOut;
    ptx::cp_async_wait<1>();
    __syncthreads();  // the stage is loaded; all warps have read the other stage
    start(row - kChunk, shared + (row / kChunk + 1 & 1) * Config::kStageBytes);

    TileIndices const indices(problem, work, workspace.tiles, row);
    uint32_t packed_grad[kDim / 16][4];
    pack<Dtype>(packed_grad, grad);
    store_image(workspace.grad_states + indices.tile * workspace.state_bytes, packed_grad);
    auto const low = reinterpret_cast<uint16_t*>(workspace.grad_values_low) +
                     indices.tile * (kChunk * kChainColumns);
    float const growth = load_float(vectors + Vectors::growth);
    if (growth > kMaxGradGrowth) {
      ptx::cp_async_wait<1>();
      __syncthreads();  // Q is loaded
      gradients_by_tokens<Dtype, kDim>(problem, work, grad, tiles, tile_q, tile_out, row,
                                       [&](int token, int half, float x) {
                                         put_grad_value<Dtype>(tile_out, token, half, x, low);
                                       });
      __syncthreads();  // all warps have read Q, which the next load overwrites
      start_q(row - kChunk);
      copy_out(problem, problem.grad_v, work, tile_out, row, work.column);
      continue;
    }
    float d[32];
    multiply_registers<Dtype, Tile, false, false>(d, packed_grad, tiles);
    TokenFactors(vectors + Vectors::b).scale(d);
    uint32_t packed_out[4][4], packed[4][4];
    load_transposed(packed_out, tile_out);
    multiply_registers<Dtype, Triangle, true, true>(d, packed_out, tiles + Config::kScores);
    solve<true>(d, workspace.records[indices.record], tiles + Config::kInverse,
                vectors + kVectorBeta, growth > kCarefulGrowth);
    TokenFactors(vectors + kVectorBeta).scale(d);
    __syncwarp();  // all lanes have read the warp's columns of dOut, which dV overwrites
    pack<Dtype>(packed, d);
    put_operand(tile_out, packed);
    copy_out(problem, problem.grad_v, work, tile_out, row, work.column);
    if (growth > kCarefulGrowth) {
      __syncwarp();  // all lanes have copied dV out of the tile
      pack_low<Dtype>(packed, d);
      put_operand(tile_out, packed);
      copy_columns(low, kChainColumns, tile_out, kChunk, kChainColumns);
    }
    TokenFactors(vectors).scale(d);
#pragma unroll
    for (float& value : d) value = -value;
    pack<Dtype>(packed, d);
    scale_operand<Dtype>(packed_out, vectors + Vectors::c);
    float const decay = load_float(vectors + Vectors::decay);
#pragma unroll
    for (float& value : grad) value *= decay;
    multiply_registers<Dtype, Tile, true, true>(grad, packed, tiles);
    ptx::cp_async_wait<1>();
    __syncthreads();  // Q is loaded
    multiply_registers<Dtype, Tile, true, true>(grad, packed_out, tile_q);
    __syncthreads();  // all warps have read Q, which the next load overwrites
    start_q(row - kChunk);
  }
  if (problem.grad_initial_state.data != nullptr) {
    for_each_state_element<kDim>(problem, problem.grad_initial_state, work, work.column,
                                 [&](int i, float* to) { *to = grad[i]; });
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
