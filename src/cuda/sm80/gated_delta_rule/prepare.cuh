// The first kernel of the forward and of the backward: computes the records of all chunks in
// parallel, everything that does not depend on a state. A block takes a chunk of one head of q and
// k, with up to four of its heads of v, and computes Q K^T and K K^T once. Then each warp writes
// its rows of these heads' scores and, without block barriers, solves for one head of v. mma.sync
// on every architecture.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "core/warp_copy.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/problem.h"
#include "gated_delta_rule/triangle.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/pin.cuh"
#include "ptx/warp_uniform.cuh"
#include "sm80/gated_delta_rule/chunk_vectors.cuh"
#include "sm80/gated_delta_rule/inverse.cuh"
#include "sm80/gated_delta_rule/solution.cuh"
#include "sm80/gemm.cuh"
#include "sm80/pipeline.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Record>
struct PrepareArgs {
  FwdProblem problem;
  Record* records;        // [chunk][head]
  uint32_t group_blocks;  // blocks per group of heads of v, kHeadsAtOnce heads in each
};

// Record_: ChunkRecord or GradRecord, for which Solution is specialized.
template <class Dtype_, int kDim_, class Record_ = ChunkRecord>
struct PrepareConfig {
  using Dtype = Dtype_;
  using Record = Record_;
  static constexpr int kDim = kDim_;
  using Layout = SmemLayout<kChunk, kDim>;
  static constexpr int kThreads = 128;
  // Q and K; later overwritten with a matrix per warp.
  static constexpr int kTiles = 2 * Layout::kBytes;
  static constexpr int kMatrices = kThreads / 32 * SolutionMatrix::kBytes;
  static constexpr int kFirst = kTiles > kMatrices ? kTiles : kMatrices;
  static constexpr int kSharedMemory = kFirst + static_cast<int>(sizeof(PrepareSmem));
};

// The row of 8 x 8 tiles that accumulators of this half belong to. Each warp has eight rows from
// the top and eight from the bottom, for an equal share of the triangle below the diagonal.
__device__ __forceinline__ int tile_row_of(const Lane& lane, int half) {
  return half == 0 ? lane.warp : 7 - lane.warp;
}

// The lane's ldmatrix address of operand A: the rows of tile_row_of().
template <class Layout>
__device__ __forceinline__ FragmentAddress<Layout> rows_address(uint32_t tile) {
  int const lane_id = static_cast<int>(threadIdx.x) % 32;
  return {tile + Layout::unit_offset(8 * tile_row_of(Lane(), lane_id / 8 % 2) + lane_id % 8,
                                     lane_id / 16)};
}

using SquareRows = Accumulator<16, kChunk>;

// The warp's 16 rows of products of Q and K, before they are normalized.
struct RowProducts {
  SquareRows qk, kk;
  Accumulator<16, 16> qq;  // q . q of its rows: the squared norms are on the diagonal

  // `q`, `k`: the tiles' addresses. One loop, so that each operand is loaded once.
  template <class Config>
  __device__ __forceinline__ void multiply(uint32_t q, uint32_t k) {
    using Dtype = typename Config::Dtype;
    using Layout = typename Config::Layout;
    auto const rows_q = rows_address<Layout>(q), rows_k = rows_address<Layout>(k);
    FragmentAddress<Layout> const columns{k + fragment_offset_b<Layout>()};
    int const last = 7 - ptx::warp_uniform(Lane().warp);  // tile on the diagonal
    qk.clear();
    kk.clear();
    qq.clear();
#pragma unroll
    for (int step = 0; step < Config::kDim / 16; ++step) {
      uint32_t a_q[4], a_k[4];
      ptx::ldmatrix_x4(a_q, rows_q.unit(2 * step));
      ptx::ldmatrix_x4(a_k, rows_k.unit(2 * step));
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows of operand A, reused as B
        ptx::mma_m16n8k16<Dtype>(qq.tile[0][half], a_q, a_q[half], a_q[half + 2]);
      }
#pragma unroll
      for (int n = 0; n < kChunk / 8; n += 2) {
        if (n >= 6 && n > last) break;  // above the diagonal: `last` is 4 to 7
        uint32_t b[4];
        ptx::ldmatrix_x4(b, columns.unit(2 * step) + n * 8 * Layout::kRowBytes);
        ptx::mma_m16n8k16<Dtype>(qk.tile[0][n], a_q, b[0], b[1]);
        ptx::mma_m16n8k16<Dtype>(qk.tile[0][n + 1], a_q, b[2], b[3]);
        ptx::mma_m16n8k16<Dtype>(kk.tile[0][n], a_k, b[0], b[1]);
        ptx::mma_m16n8k16<Dtype>(kk.tile[0][n + 1], a_k, b[2], b[3]);
      }
    }
  }
};

// Writes the normalization factors of the warp's rows, 1 / sqrt(sum of squares + 1e-6).
__device__ __forceinline__ void compute_norms(const RowProducts& products, PrepareSmem& smem) {
  Lane const lane;
  if (lane.t != lane.g / 2) return;  // not a lane that holds diagonal elements
  bool const odd = lane.g % 2 != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = tile_row_of(lane, half), row = 8 * m + lane.g;
    const float (&squares_q)[4] = products.qq.tile[0][half];
    float square_k = 0.f;
#pragma unroll
    for (int n = 4 * half; n < 4 * half + 4; ++n) {
      const float (&tile)[4] = products.kk.tile[0][n];
      if (n == m) square_k = odd ? tile[2 * half + 1] : tile[2 * half];
    }
    smem.norm_q[row] = rsqrtf((odd ? squares_q[2 * half + 1] : squares_q[2 * half]) + 1e-6f);
    smem.norm_k[row] = rsqrtf(square_k + 1e-6f);
  }
}

// Stores the warp's 16 rows of N: K K^T, of normalized rows.
__device__ __forceinline__ void store_products(const SquareRows& kk, PrepareSmem& smem) {
  Lane const lane;
  float2 norms[kChunk / 8];
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) norms[n] = pair_of(smem.norm_k, 8 * n + 2 * lane.t);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = tile_row_of(lane, half);
    TileRowAddresses const addresses(smem.products, m, lane);
    float const factor = smem.norm_k[8 * m + lane.g];
#pragma unroll
    for (int n = 0; n < 4 * half + 4; ++n) {
      if (n > m) break;
      const float (&tile)[4] = kk.tile[0][n];
      addresses.put(n, tile[2 * half] * (factor * norms[n].x),
                    tile[2 * half + 1] * (factor * norms[n].y));
    }
  }
}

// Masks of the lane's packed words of P where a tile may lie on the diagonal or above it: tiles 0
// to 3 of the warp's rows from the top, 4 to 7 of those from the bottom.
struct ScoreMasks {
  uint32_t words[2][4];

  __device__ __forceinline__ ScoreMasks() {
    Lane const lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const n = 4 * half + i, below = 8 * (tile_row_of(lane, half) - n) + lane.g - 2 * lane.t;
        words[half][i] = below > 0 ? 0xffffffffu : below == 0 ? 0xffffu : 0u;
      }
    }
  }
};

// Writes the warp's 16 rows of P of a head.
template <class Dtype, bool kFarGates>
__device__ __forceinline__ void write_scores(const SquareRows& qk, const ScoreMasks& masks,
                                             const HeadVectors& head, uint16_t* scores) {
  Lane const lane;
  float2 columns[kChunk / 8] = {};
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    if (n < 5 || n <= tile_row_of(lane, 1))
      columns[n] = pair_of(head.score_columns, 8 * n + 2 * lane.t);
  }
  unsigned char* const to =
      reinterpret_cast<unsigned char*>(scores) + Triangle::unit_offset(lane.g, lane.t);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = tile_row_of(lane, half);
    float const factor = head.score_rows[8 * m + lane.g];
    float const row_sum = kFarGates ? head.sums[8 * m + lane.g] : 0.f;
#pragma unroll
    for (int block = 0; block <= half; ++block) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const n = 4 * block + i;
        float first = factor * columns[n].x, second = factor * columns[n].y;
        if constexpr (kFarGates) {
          float2 const sums = pair_of(head.sums, 8 * n + 2 * lane.t);
          first *= exp2_approx(row_sum - sums.x);
          second *= exp2_approx(row_sum - sums.y);
        }
        words[i] =
            Dtype::pack(first * qk.tile[0][n][2 * half], second * qk.tile[0][n][2 * half + 1]);
        // 0 is selected, not multiplied by: the factors may be inf above the diagonal.
        if (block == half) words[i] &= masks.words[half][i];
      }
      *reinterpret_cast<uint4*>(to + 8 * m * Triangle::kRowBytes +
                                block * Triangle::kColBlockBytes) = transpose_quad(words);
    }
  }
}

// Computes the first matrix of the warp's head in shared memory. Returns its growth.
template <class Config, bool kRare>
__device__ __forceinline__ float solve(unsigned char* shared, bool low = false) {
  int const warp = static_cast<int>(threadIdx.x / 32);
  auto& smem = *reinterpret_cast<PrepareSmem*>(shared + Config::kFirst);
  return SolutionWriter<typename Config::Record, kRare>(smem.products, smem.heads[warp],
                                                        smem.totals[warp],
                                                        shared + warp * SolutionMatrix::kBytes, low)
      .write();
}

// solve() of a chunk with far gates, or of the low part. Not inlined: these are rare, and the code
// is long.
template <class Config>
__device__ __noinline__ float call_solve(bool low) {
  extern __shared__ __align__(1024) unsigned char shared[];
  return solve<Config, true>(shared, low);
}

// Writes the first matrix of the warp's head and its growth to its record; in careful chunks the
// low part too. `shared`: the block's shared memory.
template <class Config>
__device__ __forceinline__ void write_solution(unsigned char* shared, bool far_gates,
                                               typename Config::Record* records, uint32_t index) {
  using FirstMatrix = Solution<typename Config::Record>;
  unsigned char* const matrix = shared + threadIdx.x / 32 * SolutionMatrix::kBytes;
  float const growth = far_gates ? call_solve<Config>(false) : solve<Config, false>(shared);
  // Computed here and not earlier, so that the address takes no registers during solve().
  typename Config::Record& record = records[ptx::pin(index)];
  start_warp_copy<Triangle::kBytes>(FirstMatrix::matrix(record), matrix);
  if (threadIdx.x % 32 == 0) record.growth = growth;
  finish_warp_copies();  // the low part overwrites the matrix, or the block exits
  if constexpr (FirstMatrix::kCareful < __builtin_huge_valf()) {
    if (growth > FirstMatrix::kCareful) {
      call_solve<Config>(true);
      start_warp_copy<Triangle::kBytes>(FirstMatrix::low(record), matrix);
      finish_warp_copies();
    }
  }
}

// Grid, on one axis: chunks of all sequences x heads of q and k x blocks of their groups.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 4)
    prepare_kernel(const __grid_constant__ PrepareArgs<typename Config::Record> args) {
  using Dtype = typename Config::Dtype;
  using Layout = typename Config::Layout;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdProblem& problem = args.problem;
  ptx::griddepcontrol_launch_dependents();  // PDL: the next kernel's blocks may start as SMs become
                                            // free
  uint32_t const heads_and_chunk = blockIdx.x / args.group_blocks;
  uint32_t const part = blockIdx.x - heads_and_chunk * args.group_blocks;
  uint32_t const slot = heads_and_chunk / static_cast<uint32_t>(problem.heads_qk);
  uint32_t const head_qk = heads_and_chunk - slot * problem.heads_qk;
  TileCoordinate const chunk = problem.rows.find(slot, problem.sequences, kChunk);
  Span const span = problem.rows.span(chunk.batch);
  int32_t const count = span.count - chunk.first;
  if (count <= 0) return;  // a surplus chunk
  int64_t const batch = problem.rows.offsets == nullptr ? chunk.batch : 0;
  int64_t const row = int64_t{span.first} + chunk.first;

  int const warp = ptx::warp_uniform(static_cast<int>(threadIdx.x) / 32);
  int32_t const first_of_group = static_cast<int32_t>(part) * kHeadsAtOnce;
  int32_t const first_head = head_qk * problem.group + first_of_group;
  int32_t const heads = min(problem.group - first_of_group, kHeadsAtOnce);
  ThreadGates gates(problem, {batch, row, first_head}, heads, count);
  auto load = [&](const Tensor& from, unsigned char* tile) {
    load_tile<Layout, Config::kThreads, true>(
        tile,
        from.data + batch * from.batch_stride + row * from.seq_stride + head_qk * from.head_stride,
        from.seq_stride, count, problem.head_dim);
  };
  load(problem.q, shared);
  load(problem.k, shared + Layout::kBytes);
  ptx::cp_async_commit();
  auto& smem = *reinterpret_cast<PrepareSmem*>(shared + Config::kFirst);
  gates.store(problem, smem.heads);  // while Q and K are loaded
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q and K are loaded, and all gates are written

  RowProducts products;
  uint32_t const q = ptx::smem_address(shared);
  products.template multiply<Config>(q, q + Layout::kBytes);
  if (problem.qk_l2norm) {
    compute_norms(products, smem);
  } else if (threadIdx.x < kChunk) {
    smem.norm_q[threadIdx.x] = smem.norm_k[threadIdx.x] = 1.f;
  }
  __syncthreads();  // all norms are written; all warps have read Q and K
  store_products(products.kk, smem);
  uint32_t const first_record = slot * problem.heads + first_head;
  typename Config::Record* const records = args.records + first_record;
  if (warp < heads) compute_vectors(smem, smem.heads[warp], problem.scale, records[warp]);
  __syncthreads();  // N and the vectors of all heads are written

  uint32_t const far_gates = find_far_gates(smem, heads);
  ScoreMasks const masks;
  for (int32_t i = 0; i < heads; ++i) {
    const HeadVectors& head = smem.heads[i];
    if ((far_gates >> i & 1) == 0) {
      write_scores<Dtype, false>(products.qk, masks, head, records[i].scores);
    } else {
      write_scores<Dtype, true>(products.qk, masks, head, records[i].scores);
    }
  }
  if (warp < heads)
    write_solution<Config>(shared, (far_gates >> warp & 1) != 0, args.records, first_record + warp);
}

}  // namespace flashvar::sm80::gated_delta_rule
