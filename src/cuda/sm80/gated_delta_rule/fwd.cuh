// The second kernel of the forward: carries the state through the chunks of a sequence, with
// mma.sync and cp.async. Four warps hold 64 columns of the state of one head
// (gated_delta_rule/chain.cuh). Head dims above 128: fwd_wide.cuh.
//
// A chunk is loaded as two cp.async groups. The first has what the state needs: K, V, the record's
// update and vectors; double-buffered. The second has what the output needs, Q and the record's
// scores; single-buffered, in flight while the updates are computed. At head dim 128 this fits the
// 99 KB of shared memory of compute capability 8.6.
#pragma once
#include <cstdint>
#include <type_traits>

#include "gated_delta_rule/chain.cuh"
#include "gated_delta_rule/segment_work.cuh"
#include "gated_delta_rule/triangle.cuh"
#include "ptx/vectors.cuh"
#include "sm80/gemm.cuh"
#include "sm80/pipeline.cuh"

namespace flashvar::sm80::gated_delta_rule {

using namespace flashvar::gated_delta_rule;  // what all architectures share

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

template <class Target, class Dtype_, int kDim_, bool kOutput_ = true>
struct FwdConfig {
  using Loads = FwdLoads<FwdConfig>;
  using Dtype = Dtype_;
  static constexpr int kDim = kDim_;
  static constexpr bool kOutput = kOutput_;
  static constexpr int kColumns = 64;
  static constexpr int kThreads = 128;
  using Tile = SmemLayout<kChunk, kDim>;      // K and Q
  using Square = SmemLayout<kChunk, kChunk>;  // V
  static constexpr int kVectorBytes = sizeof(ChunkRecord) - offsetof(ChunkRecord, a);

  // A stage: K, update, V, vectors.
  static constexpr int kUpdate = Tile::kBytes;
  static constexpr int kV = kUpdate + Triangle::kBytes;
  static constexpr int kVectors = kV + Square::kBytes;
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
  uint32_t const lane =
      tile + (kTransposed ? fragment_offset<Layout>() : fragment_offset_b<Layout>());
#pragma unroll
  for (int kk = 0; kk < kSteps; ++kk) {
#pragma unroll
    for (int n = 0; n < kElements / 4; n += 2) {
      if (std::is_same<Layout, Triangle>::value && (kTransposed ? n / 2 > kk : n / 2 < kk))
        continue;
      uint32_t b[4];
      if constexpr (kTransposed) {
        ptx::ldmatrix_x4_trans(b, Layout::advance(lane, n) + kk * 16 * Layout::kRowBytes);
      } else {
        ptx::ldmatrix_x4(b, Layout::advance(lane, 2 * kk) + n * 8 * Layout::kRowBytes);
      }
      ptx::mma_m16n8k16<Dtype>(reinterpret_cast<float (&)[4]>(d[4 * n]), a[kk], b[0], b[1]);
      ptx::mma_m16n8k16<Dtype>(reinterpret_cast<float (&)[4]>(d[4 * n + 4]), a[kk], b[2], b[3]);
    }
  }
}

// Starts copies of `bytes` contiguous bytes (cp.async), by all threads of the block.
template <int kThreads = 128>
__device__ __forceinline__ void copy_async(uint32_t smem, const void* from, int bytes) {
  const char* const source = static_cast<const char*>(from);
  for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += kThreads * 16) {
    ptx::cp_async_16(smem + i, source + i, true);
  }
}

// Starts the loads of a chunk, as two cp.async groups. Those of chunks past the last are empty, so
// that the number of groups in flight is constant.
template <class Config>
struct FwdLoads {
  const FwdArgs& args;
  const Work& work;
  int32_t columns;  // of V, from the block's first on; 0 for a transition
  unsigned char* shared;

  __device__ __forceinline__ const ChunkRecord& record(int32_t row) const {
    return args.records[(work.first_chunk + row / kChunk) * args.problem.heads + work.head];
  }

  template <class Layout>
  __device__ __forceinline__ void load(unsigned char* tile, const Tensor& from, uint32_t head,
                                       int32_t row, int32_t column, int32_t columns) const {
    const uint16_t* const source = from.data + work.batch * from.batch_stride +
                                   (int64_t{work.span.first} + row) * from.seq_stride +
                                   head * from.head_stride + column;
    load_tile<Layout, Config::kThreads, true>(tile, source, from.seq_stride, work.span.count - row,
                                              columns);
  }

  __device__ __forceinline__ void start_state(int32_t row, unsigned char* stage) const {
    if (row < work.span.count) {
      const FwdProblem& problem = args.problem;
      load<typename Config::Tile>(stage, problem.k, work.head_qk, row, 0, problem.head_dim);
      load<typename Config::Square>(stage + Config::kV, problem.v, work.head, row, work.column,
                                    columns);
      uint32_t const to = ptx::smem_address(stage);
      copy_async(to + Config::kUpdate, record(row).update, sizeof(ChunkRecord::update));
      copy_async(to + Config::kVectors, record(row).a, Config::kVectorBytes);
    }
    ptx::cp_async_commit();
  }

  // Without the output an empty group.
  __device__ __forceinline__ void start_scores(int32_t row) const {
    if (Config::kOutput && row < work.span.count) {
      load<typename Config::Tile>(shared + Config::kQ, args.problem.q, work.head_qk, row, 0,
                                  args.problem.head_dim);
      copy_async(ptx::smem_address(shared + Config::kScores), record(row).scores,
                 sizeof(ChunkRecord::scores));
    }
    ptx::cp_async_commit();
  }

  // Starts the loads of the first chunk.
  __device__ __forceinline__ void start() const {
    start_state(0, shared);
    start_scores(0);
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
      int const row = token + e;
      uint32_t const address = tile + row * 128 + ((column / 8 ^ (row & 7)) * 16) + column % 8 * 2;
      ptx::shared_store(address, static_cast<uint16_t>(words[i] >> (16 * e)));
    }
  }
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
  unsigned char* const shared = loads.shared;
  uint32_t packed_state[kDim / 16][4];
  pack<Dtype>(packed_state, state);

  for (int32_t row = 0; row < work.span.count; row += kChunk) {
    unsigned char* const stage = shared + row / kChunk % 2 * Config::kStageBytes;
    uint32_t const tiles = ptx::smem_address(stage), vectors = tiles + Config::kVectors;
    ptx::cp_async_wait<1>();
    __syncthreads();  // the chunk's first group is loaded; all warps have read the other stage
    loads.start_state(row + kChunk, shared + (row / kChunk + 1) % 2 * Config::kStageBytes);

    uint32_t const tile_v = tiles + Config::kV, tile_q = ptx::smem_address(shared + Config::kQ);
    if (load_float(vectors + Offsets::growth) > kMaxGrowth) {
      ptx::cp_async_wait<1>();
      __syncthreads();  // the chunk's second group is loaded
      step_by_tokens<Dtype, kDim, kOutput>(problem, work, state, tiles, tile_q, tile_v, row);
      pack<Dtype>(packed_state, state);
      __syncthreads();  // all warps have read Q, which the next group overwrites
      loads.start_scores(row + kChunk);
      if constexpr (kOutput) copy_out(problem, problem.out, work, tile_v, row, work.column);
      continue;
    }
    float predicted[32], update[32];  // S^T K^T, then W^T; U^T
    multiply_registers<Dtype, Tile, false, false>(predicted, packed_state, tiles);
    uint32_t packed[4][4], packed_decayed[4][4];  // decayed: b o U^T
    float descale[2];
    ValueTile(tile_v).template subtract<Dtype>(predicted, TokenFactors(vectors));
    pack_scaled(packed, predicted, descale);
    multiply_registers<dtype::fp16, Triangle, false, false>(update, packed,
                                                            tiles + Config::kUpdate);
    scale_rows(update, descale);
    pack<Dtype>(packed, update);
    TokenFactors(vectors + Offsets::b).scale(update);
    pack<Dtype>(packed_decayed, update);

    ptx::cp_async_wait<1>();
    __syncthreads();  // the chunk's second group is loaded
    float out[32];
    if constexpr (kOutput) {
      multiply_registers<Dtype, Tile, false, false>(out, packed_state, tile_q);
      TokenFactors(vectors + Offsets::c).scale(out);
      multiply_registers<Dtype, Triangle, false, true>(out, packed,
                                                       ptx::smem_address(shared + Config::kScores));
    }
    float const decay = load_float(vectors + Offsets::decay);
#pragma unroll
    for (float& value : state) value *= decay;
    multiply_registers<Dtype, Tile, true, true>(state, packed_decayed, tiles);
    pack<Dtype>(packed_state, state);
    __syncthreads();  // all warps have read Q and the scores, which the next group overwrites
    loads.start_scores(row + kChunk);
    if constexpr (kOutput) {
      store_out<Dtype>(
          problem, work, out, tile_v, row, work.column,
          [&](int n, const uint32_t (&words)[4]) { put_transposed(tile_v, n, words); });
    }
  }
}

// Grid, on one axis: segments (SegmentWork::of_segment) x heads x column tiles of V.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs args) {
  constexpr int kDim = Config::kDim;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdProblem& problem = args.problem;
  auto const work = SegmentWork::of_segment(problem, args.segments, args.boundaries,
                                            args.column_tiles, Config::kColumns);
  if (!work.exists) return;
  typename Config::Loads const loads{args, work, problem.head_dim_v - work.column, shared};
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
  InnerWork const work(problem, args.segments, args.column_tiles, Config::kColumns, true);
  if (!work.exists) return;
  typename Config::Loads const loads{args, work, work.values(problem), shared};
  loads.start();
  float state[kDim / 2];
  load_first_state<kDim>(problem, work, work.column, state);
  advance_state(loads, state);
  store_last_state<kDim>(problem, args.between, work, work.column, state);
}

}  // namespace flashvar::sm80::gated_delta_rule
