// The first kernel of the forward: what no state enters, of every chunk at once. A block takes a
// chunk and a head of q and k, multiplies Q K^T and K K^T once, and writes the record of
// each of the head's v heads. mma.sync on every architecture: the chains that follow take the time.
#pragma once
#include <cstdint>

#include "core/quad.cuh"
#include "gated_delta_rule/chunk.h"
#include "gated_delta_rule/gates.cuh"
#include "gated_delta_rule/problem.h"
#include "ptx/grid_dependency.cuh"
#include "sm80/gated_delta_rule/inverse.cuh"
#include "sm80/gemm.cuh"
#include "sm80/pipeline.cuh"

namespace flashvar::sm80::gated_delta_rule {

template <class Record>
struct PrepareArgs {
  FwdProblem problem;
  Record* records;  // [chunk][head]
};

// Heads of v whose gates are found at once, one by each warp.
inline constexpr int kHeadsAtOnce = 4;

// The gates of a chunk of a head.
struct HeadRows {
  float sums[kChunk];  // G, in log2 units
  float beta[kChunk];  // 0 beyond the sequence, as all other rows are
  int growth;          // as the bits of a float
  int unused[3];
};

// The chunk's shared memory behind the tiles.
struct ChunkRows {
  float scratch[1024];
  float norm_q[kChunk], norm_k[kChunk];  // factors of rows: 1 where they are not normalised
  HeadRows heads[kHeadsAtOnce];
};

// Record_: ChunkRecord or GradRecord, for which write_a(), write_vectors() and
// write_matrices() are overloaded.
template <class Dtype_, int kDim_, class Record_ = ChunkRecord>
struct PrepareConfig {
  using Dtype = Dtype_;
  using Record = Record_;
  static constexpr int kDim = kDim_;
  using Layout = SmemLayout<kChunk, kDim>;
  static constexpr int kThreads = 128;
  // Q and K; then in their place A and its inverse.
  static constexpr int kTiles = 2 * Layout::kBytes;
  static constexpr int kMatrices = 2 * Matrix::kFloats * 4;
  static constexpr int kFirst = kTiles > kMatrices ? kTiles : kMatrices;
  static constexpr int kSharedMemory = kFirst + static_cast<int>(sizeof(ChunkRows));
};

// 1 / sqrt(sum of squares + 1e-6) of rows 0 to 63, two threads to a row.
template <class Config>
__device__ __forceinline__ float row_norm(uint32_t tile) {
  using Layout = typename Config::Layout;
  int const row = static_cast<int>(threadIdx.x) / 2, half = static_cast<int>(threadIdx.x) % 2;
  float sum = 0.f;
#pragma unroll
  for (int chunk = 0; chunk < Config::kDim / 8; chunk += 2) {
    int const mine = chunk + half;
    uint32_t const address =
        tile + mine / 8 * Layout::kColBlockBytes + Layout::chunk_offset(row, mine % 8);
    uint32_t words[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const low = Config::Dtype::unpack(static_cast<uint16_t>(words[i]));
      float const high = Config::Dtype::unpack(static_cast<uint16_t>(words[i] >> 16));
      sum = fmaf(low, low, fmaf(high, high, sum));
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  return rsqrtf(sum + 1e-6f);
}

// Finds G and beta of a head, by one warp: each lane has two tokens in a row.
__device__ __forceinline__ void find_gates(const FwdProblem& problem, const GatePlace& first,
                                           int32_t count, HeadRows& rows) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  float decay[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    GatePlace const place{first.batch, first.row + 2 * lane + i, first.head};
    bool const exists = 2 * lane + i < count;
    decay[i] = exists ? decay_log(problem, place) * (1.f / kLn2) : 0.f;
    beta[i] = exists ? beta_of(problem, place) : 0.f;
  }
  float const before = sum_before(decay[0] + decay[1]);
  rows.sums[2 * lane] = before + decay[0];
  rows.sums[2 * lane + 1] = before + (decay[0] + decay[1]);
  rows.beta[2 * lane] = beta[0];
  rows.beta[2 * lane + 1] = beta[1];
  rows.growth = 0;
}

// Writes the record's vectors of a head, by one warp.
__device__ __forceinline__ void write_vectors(const ChunkRows& rows, const HeadRows& head,
                                              float scale, ChunkRecord& record) {
  float const last = head.sums[kChunk - 1];
#pragma unroll
  for (int row = static_cast<int>(threadIdx.x) % 32; row < kChunk; row += 32) {
    float const sum = head.sums[row];
    record.a[row] = exp2_approx(sum) * rows.norm_k[row];
    record.b[row] = exp2_approx(last - sum) * rows.norm_k[row];
    record.c[row] = scale * exp2_approx(sum) * rows.norm_q[row];
  }
  if (threadIdx.x % 32 == 0) record.decay = exp2_approx(last);
}

// The element's place of a 16-byte chunk of a record's matrix.
__device__ __forceinline__ uint4& matrix_chunk(uint16_t* matrix, int row, int chunk) {
  return reinterpret_cast<uint4*>(matrix)[row * 8 + (chunk ^ (row & 7))];
}

// The chunk's row that the lane's accumulators of this half are of. Every warp has eight rows from
// the start and eight from the end, as work is for what is below the diagonal.
__device__ __forceinline__ int row_of(const Lane& at, int half) {
  return (half == 0 ? 8 * at.warp : 56 - 8 * at.warp) + at.g;
}
// Whether tile n of 8 columns reaches below the diagonal in these rows.
__device__ __forceinline__ bool reaches_below(const Lane& at, int half, int n) {
  return n <= (half == 0 ? at.warp : 7 - at.warp);
}

// The lane's address of operand A for gemm_nt: the rows of row_of().
template <class Layout>
__device__ __forceinline__ FragmentAddress<Layout> rows_address(uint32_t tile) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const first = lane / 8 % 2 == 0 ? 8 * Lane().warp : 56 - 8 * Lane().warp;
  return {tile + Layout::chunk_offset(first + lane % 8, lane / 16)};
}

__device__ __forceinline__ float2 pair_of(const float* vector, int first) {
  return *reinterpret_cast<const float2*>(vector + first);
}

// A, of the warp's 16 rows; what it writes on and above the diagonal is not read.
__device__ __forceinline__ void write_a(const ChunkRecord&, const Accumulator<16, kChunk>& kk,
                                        const ChunkRows& rows, const HeadRows& head,
                                        const Matrix& a) {
  Lane const at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row_of(at, half);
    float const factor = head.beta[i] * rows.norm_k[i];
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      if (!reaches_below(at, half, n)) break;
      float2 const norm = pair_of(rows.norm_k, 8 * n + 2 * at.t);
      a.set_pair(i, 8 * n + 2 * at.t, kk.tile[0][n][2 * half] * factor * norm.x,
                 kk.tile[0][n][2 * half + 1] * factor * norm.y);
    }
  }
}

// Stores the lane's words of row i of a record's matrix, 16 bytes at a time.
__device__ __forceinline__ void store_matrix_row(uint16_t* matrix, const Lane& at, int i,
                                                 const uint32_t (&words)[kChunk / 8]) {
#pragma unroll
  for (int n = 0; n < kChunk / 8; n += 4) {
    uint32_t quad[4] = {words[n], words[n + 1], words[n + 2], words[n + 3]};
    matrix_chunk(matrix, i, n + at.t) = transpose_quad(quad);
  }
}

// The record's matrices, of the warp's 16 rows: (T o D) diag(beta) and P. The head's growth takes
// the largest sum of absolute values of a row of the first.
template <class Dtype>
__device__ __forceinline__ void write_matrices(const Accumulator<16, kChunk>& qk,
                                               const Matrix& inverse, float scale,
                                               const ChunkRows& rows, HeadRows& head,
                                               ChunkRecord& record) {
  Lane const at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = row_of(at, half);
    float const sum = head.sums[i], factor = scale * rows.norm_q[i];
    uint32_t update[kChunk / 8] = {}, scores[kChunk / 8] = {};
    float total = 0.f;
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      if (!reaches_below(at, half, n)) break;
      int const j = 8 * n + 2 * at.t;
      float2 const sums = pair_of(head.sums, j), beta = pair_of(head.beta, j);
      float2 const t = inverse.pair(i, j);
      float const decay[2] = {exp2_approx(sum - sums.x), exp2_approx(sum - sums.y)};
      // Above the diagonal there are no elements: 0, and not a product.
      float const first = j <= i ? t.x * beta.x * decay[0] : 0.f;
      float const second = j < i ? t.y * beta.y * decay[1] : 0.f;
      total += fabsf(first) + fabsf(second);
      update[n] = dtype::fp16::pack(first, second);
      float2 const norm = pair_of(rows.norm_k, j);
      const float (&tile)[4] = qk.tile[0][n];
      scores[n] = Dtype::pack(j <= i ? tile[2 * half] * (factor * norm.x) * decay[0] : 0.f,
                              j < i ? tile[2 * half + 1] * (factor * norm.y) * decay[1] : 0.f);
    }
    total = quad_sum(total);
    if (at.t == 0)
      atomicMax(&head.growth, __float_as_int(total));  // positive floats sort as integers
    store_matrix_row(record.update, at, i, update);
    store_matrix_row(record.scores, at, i, scores);
  }
}

// The grid: chunks of all sequences times heads of q and k, on one axis.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 4)
    prepare_kernel(const __grid_constant__ PrepareArgs<typename Config::Record> args) {
  using Layout = typename Config::Layout;
  using Record = typename Config::Record;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdProblem& problem = args.problem;
  ptx::griddepcontrol_launch_dependents();  // the chains' blocks start as SMs become free
  uint32_t const slot = blockIdx.x / static_cast<uint32_t>(problem.heads_qk);
  uint32_t const head = blockIdx.x - slot * problem.heads_qk;
  TileCoordinate const chunk = problem.rows.find(slot, problem.sequences, kChunk);
  Span const span = problem.rows.span(chunk.batch);
  int32_t const count = span.count - chunk.first;
  if (count <= 0) return;  // more chunks were launched than there are
  int64_t const batch = problem.rows.offsets == nullptr ? chunk.batch : 0;
  int64_t const row = int64_t{span.first} + chunk.first;

  auto load = [&](const Tensor& from, unsigned char* tile) {
    load_tile<Layout, Config::kThreads, true>(
        tile,
        from.data + batch * from.batch_stride + row * from.seq_stride + head * from.head_stride,
        from.seq_stride, count, problem.head_dim);
  };
  load(problem.q, shared);
  load(problem.k, shared + Layout::kBytes);
  ptx::cp_async_commit();
  auto& rows = *reinterpret_cast<ChunkRows*>(shared + Config::kFirst);
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int32_t const first_head = head * problem.group;
  auto find = [&](int32_t first) {
    if (first + warp < problem.group) {
      find_gates(problem, {batch, row, first_head + first + warp}, count, rows.heads[warp]);
    }
  };
  find(0);  // while Q and K are under way
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q and K are there

  uint32_t const q = ptx::smem_address(shared), k = q + Layout::kBytes;
  {
    bool const normalise = problem.qk_l2norm;
    float const norm_q = normalise ? row_norm<Config>(q) : 1.f;
    float const norm_k = normalise ? row_norm<Config>(k) : 1.f;
    rows.norm_q[threadIdx.x / 2] = norm_q;
    rows.norm_k[threadIdx.x / 2] = norm_k;
  }
  Accumulator<16, kChunk> qk, kk;
  FragmentAddress<Layout> const columns{k + fragment_offset_b<Layout>()};
  gemm_nt<typename Config::Dtype, Config::kDim>(qk, rows_address<Layout>(q), columns);
  gemm_nt<typename Config::Dtype, Config::kDim>(kk, rows_address<Layout>(k), columns);

  Matrix const a{reinterpret_cast<float*>(shared)}, inverse{a.data + Matrix::kFloats};
  Record* const records = args.records + int64_t{slot} * problem.heads + first_head;
  for (int32_t first = 0; first < problem.group; first += kHeadsAtOnce) {
    int32_t const heads = min(problem.group - first, kHeadsAtOnce);
    if (first > 0) find(first);
    __syncthreads();  // the gates are found; the tiles have been read
    if (warp < heads) {
      write_vectors(rows, rows.heads[warp], problem.scale, records[first + warp]);
    }
    for (int32_t i = 0; i < heads; ++i) {
      write_a(records[first + i], kk, rows, rows.heads[i], a);
      __syncthreads();  // A is there, and the last head's inverse has been read
      invert(a, inverse, rows.scratch);
      write_matrices<typename Config::Dtype>(qk, inverse, problem.scale, rows, rows.heads[i],
                                             records[first + i]);
    }
    __syncthreads();  // every head's growth is known
    if (warp < heads && threadIdx.x % 32 == 0) {
      records[first + warp].growth = __int_as_float(rows.heads[warp].growth);
    }
    __syncwarp();  // the next gates take its place
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
