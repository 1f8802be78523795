// The chain of the forward for head dims above 128, in the 99 KB of shared memory of compute
// capability 8.6. There are two tiles for K and Q, and each chunk swaps them: when all warps have
// read Q, the next chunk's K is loaded over it, and when they have read K, the next chunk's Q. As
// in fwd.cuh, a chunk is loaded as two cp.async groups: K, V and the vectors; Q and the record's
// matrices. Each load has about half of a chunk's time.
#pragma once
#include <cstdint>

#include "ptx/vectors.cuh"
#include "sm80/gated_delta_rule/fwd.cuh"
#include "sm80/gated_delta_rule/state_large_dim.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Config>
struct LargeDimLoads;

template <class Target, class Dtype, int kDim, bool kOutput = true>
struct LargeDimFwdConfig : FwdTiles<Dtype, kDim, kOutput> {
  using Loads = LargeDimLoads<LargeDimFwdConfig>;
  using Tiles = FwdTiles<Dtype, kDim, kOutput>;
  using Tiles::kVectorBytes;
  using typename Tiles::Tile;

  // The two tiles; two of V, and of vectors; one of each matrix.
  static constexpr int kV = 2 * Tile::kBytes;
  static constexpr int kVectors = kV + 2 * Tile64::kBytes;
  static constexpr int kSolution = kVectors + 2 * kVectorBytes;
  static constexpr int kScores = kSolution + Triangle::kBytes;
  static constexpr int kSharedMemory = kOutput ? kScores + Triangle::kBytes : kScores;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// Starts the loads of a chunk. Those of chunks past the last are empty groups.
template <class Config>
struct LargeDimLoads : ChunkLoads<Config> {
  // Offset of a chunk's buffer among two of `bytes` bytes.
  static __device__ __forceinline__ int buffer(int32_t row, int bytes) {
    return row / kChunk % 2 * bytes;
  }
  static __device__ __forceinline__ int tile_k(int32_t row) {
    return buffer(row, Config::Tile::kBytes);
  }
  static __device__ __forceinline__ int tile_q(int32_t row) { return tile_k(row + kChunk); }
  static __device__ __forceinline__ int tile_v(int32_t row) {
    return Config::kV + buffer(row, Tile64::kBytes);
  }
  static __device__ __forceinline__ int vectors(int32_t row) {
    return Config::kVectors + buffer(row, Config::kVectorBytes);
  }

  __device__ __forceinline__ void start_keys(int32_t row) const {
    if (row < this->work.span.count) {
      this->load_keys(this->shared + tile_k(row), row);
      this->load_values(this->shared + tile_v(row), row);
      copy_async(ptx::smem_address(this->shared + vectors(row)), this->record(row).a,
                 Config::kVectorBytes);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void start_queries(int32_t row) const {
    if (row < this->work.span.count) {
      const ChunkRecord& record = this->record(row);
      uint32_t const to = ptx::smem_address(this->shared);
      copy_async(to + Config::kSolution, record.solution, sizeof(ChunkRecord::solution));
      if constexpr (Config::kOutput) {
        this->load_queries(this->shared + tile_q(row), row);
        copy_async(to + Config::kScores, record.scores, sizeof(ChunkRecord::scores));
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void start() const {
    start_keys(0);
    start_queries(0);
  }
};

// As advance_state() of fwd.cuh.
template <class Config>
__device__ __forceinline__ void advance_state(const LargeDimLoads<Config>& loads,
                                              float (&state)[Config::kDim / 2]) {
  using Dtype = typename Config::Dtype;
  using Tile = typename Config::Tile;
  using Offsets = VectorOffsets<ChunkRecord>;
  constexpr int kDim = Config::kDim;
  constexpr bool kOutput = Config::kOutput;
  const FwdProblem& problem = loads.args.problem;
  const Work& work = loads.work;
  uint32_t const shared = ptx::smem_address(loads.shared);

  for (int32_t row = 0; row < work.span.count; row += kChunk) {
    uint32_t const tile_k = shared + loads.tile_k(row), tile_q = shared + loads.tile_q(row);
    uint32_t const tile_v = shared + loads.tile_v(row), vectors = shared + loads.vectors(row);
    ptx::cp_async_wait<1>();
    __syncthreads();  // K, V and the vectors are loaded
    if (ptx::shared_load_unordered<float>(vectors + Offsets::growth) > kMaxGrowth) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // Q is loaded
      step_by_tokens<Dtype, kDim, kOutput>(problem, work, state, tile_k, tile_q, tile_v, row);
      __syncthreads();  // all warps have read K and Q, which the next loads overwrite
      loads.start_keys(row + kChunk);
      loads.start_queries(row + kChunk);
      if constexpr (kOutput) copy_out(problem, problem.out, work, tile_v, row, work.column);
      continue;
    }
    float predicted[32], out[32];
    uint32_t update[4][4], decayed[4][4];  // U^T, b o U^T
    multiply_state<Dtype, Tile>(predicted, state, tile_k);
    ptx::cp_async_wait<0>();
    __syncthreads();  // Q and the matrices are loaded
    if constexpr (kOutput) {
      multiply_state<Dtype, Tile>(out, state, tile_q);  // (F3)
      __syncthreads();  // all warps have read Q, which the next K overwrites
    }
    loads.start_keys(row + kChunk);
    // (F1), (F2)
    compute_updates<Dtype>(update, decayed, predicted, tile_v, vectors, shared + Config::kSolution);
    if constexpr (kOutput) {
      TokenFactors(vectors + Offsets::c).scale(out);
      multiply_registers<Dtype, Triangle, false, true>(out, update, shared + Config::kScores);
    }
    decay_state(state, ptx::shared_load_unordered<float>(vectors + Offsets::decay));  // (F4)
    multiply_registers<Dtype, Tile, true, true>(state, decayed, tile_k);
    __syncthreads();  // all warps have read K and the matrices, which the next loads overwrite
    loads.start_queries(row + kChunk);
    if constexpr (kOutput) store_out<Dtype>(problem, work, out, tile_v, row);
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
