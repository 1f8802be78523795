// The second kernel of the forward: carries the state through the chunks of a sequence, with
// mma.sync and cp.async. Four warps hold 64 columns of the state of one head
// (gated_delta_rule/chain_parts.cuh). Head dims above 128: fwd_large_dim.cuh.
//
// A chunk is loaded as two cp.async groups. The first has what the state needs: K, V, the record's
// first matrix and vectors; double-buffered. The second has what the output needs, Q and the
// record's scores; single-buffered, in flight while the updates are computed. At head dim 128 this
// fits the 99 KB of shared memory of compute capability 8.6.
#pragma once
#include <cstdint>
#include <type_traits>

#include "gated_delta_rule/chain_parts.cuh"
#include "gated_delta_rule/segment_work.cuh"
#include "gated_delta_rule/triangle.cuh"
#include "ptx/vectors.cuh"
#include "sm80/gated_delta_rule/chunk_loads.cuh"
#include "sm80/gemm.cuh"

namespace flashvar::sm80::gated_delta_rule {

struct FwdArgs {
  FwdProblem problem;
  const ChunkRecord* records;  // [chunk][head]
  int32_t column_tiles;        // of V; pass 1: and of transitions
  Segments segments;
  uint32_t boundaries;
  SegmentStates between;  // at boundaries, for the other passes
};

template <class Config>
struct FwdLoads;

// What the configurations of all head dims share.
template <class Dtype_, int kDim_, bool kOutput_>
struct FwdTiles {
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  static constexpr bool kOutput = kOutput_;
  static constexpr int kColumns = 64;
  static constexpr int kThreads = 128;
  using Tile = SmemLayout<kChunk, kDim>;  // K and Q
  static constexpr int kVectorBytes = sizeof(ChunkRecord) - offsetof(ChunkRecord, a);
};

template <class Target, class Dtype, int kDim, bool kOutput = true>
struct FwdConfig : FwdTiles<Dtype, kDim, kOutput> {
  using Loads = FwdLoads<FwdConfig>;
  using Tiles = FwdTiles<Dtype, kDim, kOutput>;
  using Tiles::kVectorBytes;
  using typename Tiles::Tile;

  // A stage: K, the first matrix, V, vectors.
  static constexpr int kSolution = Tile::kBytes;
  static constexpr int kV = kSolution + Triangle::kBytes;
  static constexpr int kVectors = kV + Tile64::kBytes;
  static constexpr int kStageBytes = kVectors + kVectorBytes;
  // After the two stages: Q, scores.
  static constexpr int kQ = 2 * kStageBytes;
  static constexpr int kScores = kQ + Tile::kBytes;
  static constexpr int kSharedMemory = kOutput ? kScores + Triangle::kBytes : kQ;
  static_assert(kSharedMemory <= Target::kSharedMemory);
};

// d = a B or, with kAdd, d += a B, with operand A in registers. B is a tile in shared memory whose
// columns are k, or with kTransposed whose rows are. Blocks of a Triangle that are above the
// diagonal are skipped.
template <class Dtype, class Layout, bool kTransposed, bool kAdd, int kSteps, int kElements>
__device__ __forceinline__ void multiply_registers(float (&d)[kElements],
                                                   const uint32_t (&a)[kSteps][4], uint32_t tile) {
  if constexpr (!kAdd) {
#pragma unroll
    for (float& value : d) value = 0.f;
  }
  uint32_t const fragments =
      tile + (kTransposed ? fragment_offset<Layout>() : fragment_offset_b<Layout>());
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
#pragma unroll
    for (int n = 0; n < kElements / 4; n += 2) {
      if (std::is_same<Layout, Triangle>::value && (kTransposed ? n / 2 > kk : n / 2 < kk))
        continue;
      uint32_t b[4];
      if constexpr (kTransposed) {
        ptx::ldmatrix_x4_trans(b, Layout::advance(fragments, n) + kk * 16 * Layout::kRowBytes);
      } else {
        ptx::ldmatrix_x4(b, Layout::advance(fragments, 2 * kk) + n * 8 * Layout::kRowBytes);
      }
      ptx::mma_m16n8k16<Dtype>(reinterpret_cast<float (&)[4]>(d[4 * n]), a[kk], b[0], b[1]);
      ptx::mma_m16n8k16<Dtype>(reinterpret_cast<float (&)[4]>(d[4 * n + 4]), a[kk], b[2], b[3]);
    }
  }
}

// Loads of a chunk's operands, by all threads of a block.
template <class Config>
struct ChunkLoads {
  const FwdArgs& args;
  const Work& work;
  int32_t columns;  // of V, from the block's first on; 0 for a transition
  unsigned char* shared;

  __device__ __forceinline__ const ChunkRecord& record(int32_t row) const {
    return args.records[(work.first_chunk + row / kChunk) * args.problem.heads + work.head];
  }

  __device__ __forceinline__ void load_keys(unsigned char* to, int32_t row) const {
    load_rows<typename Config::Tile, Config::kThreads>(to, args.problem.k, {work, row},
                                                       work.head_qk, 0, args.problem.head_dim);
  }
  __device__ __forceinline__ void load_values(unsigned char* to, int32_t row) const {
    load_rows<Tile64, Config::kThreads>(to, args.problem.v, {work, row}, work.head, work.column,
                                        columns);
  }
  __device__ __forceinline__ void load_queries(unsigned char* to, int32_t row) const {
    load_rows<typename Config::Tile, Config::kThreads>(to, args.problem.q, {work, row},
                                                       work.head_qk, 0, args.problem.head_dim);
  }
};

// Starts the loads of a chunk, as two cp.async groups. Those of chunks past the last are empty, so
// that the number of groups in flight is constant.
template <class Config>
struct FwdLoads : ChunkLoads<Config> {
  __device__ __forceinline__ unsigned char* stage(int32_t chunk) const {
    return this->shared + chunk % 2 * Config::kStageBytes;
  }

  __device__ __forceinline__ void start_state(int32_t row, unsigned char* stage) const {
    if (row < this->work.span.count) {
      this->load_keys(stage, row);
      this->load_values(stage + Config::kV, row);
      uint32_t const to = ptx::smem_address(stage);
      copy_async(to + Config::kSolution, this->record(row).solution, sizeof(ChunkRecord::solution));
      copy_async(to + Config::kVectors, this->record(row).a, Config::kVectorBytes);
    }
    ptx::cp_async_commit();
  }

  // Without the output an empty group.
  __device__ __forceinline__ void start_out(int32_t row) const {
    if (Config::kOutput && row < this->work.span.count) {
      this->load_queries(this->shared + Config::kQ, row);
      copy_async(ptx::smem_address(this->shared + Config::kScores), this->record(row).scores,
                 sizeof(ChunkRecord::scores));
    }
    ptx::cp_async_commit();
  }

  // Starts the loads of the first chunk.
  __device__ __forceinline__ void start() const {
    start_state(0, this->shared);
    start_out(0);
  }
};

// Stores the lane's four words of out^T, element by element, to a tile [token][column of V].
__device__ __forceinline__ void put_transposed(uint32_t tile, int n, const uint32_t (&words)[4]) {
  Lane const lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int const token = 8 * (n + i / 2) + 2 * lane.t, column = 16 * lane.warp + 8 * (i % 2) + lane.g;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      uint32_t const address = tile + Tile64::unit_offset(token + e, column / 8) + column % 8 * 2;
      ptx::shared_store(address, static_cast<uint16_t>(words[i] >> (16 * e)));
    }
  }
}

// Stores out^T of the warp's 16 columns to global memory, staged through `tile`; each warp uses its
// own columns of it.
template <class Dtype>
__device__ __forceinline__ void store_out(const FwdProblem& problem, const Work& work,
                                          const float (&d)[32], uint32_t tile, int32_t row) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Dtype::pack(d[4 * n + 2 * i], d[4 * n + 2 * i + 1]);
    put_transposed(tile, n, words);
  }
  copy_out(problem, problem.out, work, tile, row, work.column);
}

// Computes U^T = W^T ((T o D) diag(beta))^T, W^T = V^T - a o (S^T K^T), packed: as it is, and
// `decayed`, b o U^T. `matrix`: (T o D) diag(beta). `predicted`: S^T K^T, which W^T overwrites.
template <class Dtype>
__device__ __forceinline__ void compute_updates(uint32_t (&packed)[4][4], uint32_t (&decayed)[4][4],
                                                float (&predicted)[32], uint32_t tile_v,
                                                uint32_t vectors, uint32_t matrix) {
  float update[32], descale[2];
  ValueTile(tile_v).template subtract<Dtype>(predicted, TokenFactors(vectors));
  pack_scaled(packed, predicted, descale);
  multiply_registers<dtype::fp16, Triangle, false, false>(update, packed, matrix);
  scale_rows(update, descale);
  pack<Dtype>(packed, update);
  TokenFactors(vectors + VectorOffsets<ChunkRecord>::b).scale(update);
  pack<Dtype>(decayed, update);
}

// The chain of the block's columns. Precondition: the loads of the first chunk are started.
template <class Config>
__device__ __forceinline__ void advance_state(const FwdLoads<Config>& loads,
                                              float (&state)[Config::kDim / 2]) {
  using Dtype = typename Config::Dtype;
  using Tile = typename Config::Tile;
  using Offsets = VectorOffsets<ChunkRecord>;
  constexpr int kDim = Config::kDim;
  constexpr bool kOutput = Config::kOutput;
  const FwdProblem& problem = loads.args.problem;
  const Work& work = loads.work;
  uint32_t packed_state[kDim / 16][4];
  pack<Dtype>(packed_state, state);

  for (int32_t row = 0; row < work.span.count; row += kChunk) {
    unsigned char* const stage = loads.stage(row / kChunk);
    uint32_t const tile_k = ptx::smem_address(stage), vectors = tile_k + Config::kVectors;
    ptx::cp_async_wait<1>();
    __syncthreads();  // the chunk's first group is loaded; all warps have read the other stage
    loads.start_state(row + kChunk, loads.stage(row / kChunk + 1));
    uint32_t const tile_v = tile_k + Config::kV,
                   tile_q = ptx::smem_address(loads.shared + Config::kQ);

    if (ptx::shared_load_unordered<float>(vectors + Offsets::growth) > kMaxGrowth) {
      ptx::cp_async_wait<1>();
      __syncthreads();  // the chunk's second group is loaded
      step_by_tokens<Dtype, kDim, kOutput>(problem, work, state, tile_k, tile_q, tile_v, row);
      pack<Dtype>(packed_state, state);
      __syncthreads();  // all warps have read Q, which the next group overwrites
      loads.start_out(row + kChunk);
      if constexpr (kOutput) copy_out(problem, problem.out, work, tile_v, row, work.column);
      continue;
    }
    float predicted[32], out[32];
    uint32_t update[4][4], decayed[4][4];  // U^T, b o U^T
    multiply_registers<Dtype, Tile, false, false>(predicted, packed_state, tile_k);
    // (F1), (F2)
    compute_updates<Dtype>(update, decayed, predicted, tile_v, vectors, tile_k + Config::kSolution);

    ptx::cp_async_wait<1>();
    __syncthreads();  // the chunk's second group is loaded
    if constexpr (kOutput) {
      multiply_registers<Dtype, Tile, false, false>(out, packed_state, tile_q);  // (F3)
      TokenFactors(vectors + Offsets::c).scale(out);
      multiply_registers<Dtype, Triangle, false, true>(
          out, update, ptx::smem_address(loads.shared + Config::kScores));
    }
    decay_state(state, ptx::shared_load_unordered<float>(vectors + Offsets::decay));  // (F4)
    multiply_registers<Dtype, Tile, true, true>(state, decayed, tile_k);
    pack<Dtype>(packed_state, state);
    __syncthreads();  // all warps have read Q and the scores, which the next group overwrites
    loads.start_out(row + kChunk);
    if constexpr (kOutput) store_out<Dtype>(problem, work, out, tile_v, row);
  }
}

// Grid, on one axis: segments (SegmentWork::any_segment) x heads x column tiles of V.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdProblem& problem = args.problem;
  auto const work = SegmentWork::any_segment(problem, args.segments, args.boundaries,
                                             args.column_tiles, Config::kColumns);
  if (!work.exists) return;
  typename Config::Loads const loads{{args, work, problem.head_dim_v - work.column, shared}};
  loads.start();
  float state[kDim / 2];
  load_first_state<kDim>(problem, args.between, work, work.column, state);
  advance_state(loads, state);
  store_final_state<kDim>(problem, work, work.column, state);
}

// Pass 1 of segments (gated_delta_rule/segments.h). A transition is the chain of a state that
// starts as the identity, with V = 0. Grid, on one axis: boundaries x heads x column tiles, those
// of V followed by those of the transition.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    segment_kernel(const __grid_constant__ FwdArgs args) {
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdProblem& problem = args.problem;
  Pass1Work const work(problem, args.segments, args.column_tiles, Config::kColumns, true);
  if (!work.exists) return;
  typename Config::Loads const loads{{args, work, work.values(problem), shared}};
  loads.start();
  float state[kDim / 2];
  load_first_state<kDim>(problem, work, work.column, state);
  advance_state(loads, state);
  store_last_state<kDim>(problem, args.between, work, work.column, state);
}

}  // namespace flashvar::sm80::gated_delta_rule
