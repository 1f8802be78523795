// The first kernel of the forward: what no state enters, of every chunk at once. A block takes a
// chunk and a head of q and k and multiplies Q K^T and K K^T once. Then each warp writes its rows
// of the scores of all of the head's v heads, and solves for one v head at a time by itself:
// nothing waits at barriers there. mma.sync on every architecture.
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
  Record* records;        // [chunk][head]
  uint32_t group_blocks;  // of a group's heads, kHeadsAtOnce to each block
};

// Heads of v in work at once, one by each warp.
inline constexpr int kHeadsAtOnce = 4;

// Vectors of a chunk of a head. D_ij is a product of two factors, of i and of j, unless the gates
// of the chunk are `wide`: then the factors are 1.
struct HeadRows {
  float sums[kChunk];           // G, in log2 units
  float beta[kChunk];           // 0 beyond the sequence, as all other rows are
  float decay[kChunk];          // the factor of D's row
  float columns[kChunk];        // factors of columns of the record's first matrix, D's in them
  float score_columns[kChunk];  // likewise of P
  float middle;                 // what D's factors take from G
  int wide;
  int unused[2];
};

// The chunk's shared memory behind the tiles.
struct ChunkRows {
  KeyProducts products;
  float norm_q[kChunk], norm_k[kChunk];  // factors of rows: 1 where they are not normalised
  HeadRows heads[kHeadsAtOnce];
  // Of absolute values in rows of the first matrix, of its blocks on the diagonal.
  float totals[kHeadsAtOnce][kChunk];
};

// A record's matrix, while a warp writes it; it is the warp's scratch too.
inline constexpr int kMatrixBytes = kChunk * kChunk * 2;

// Record_: ChunkRecord or GradRecord, for which Solution is specialised.
template <class Dtype_, int kDim_, class Record_ = ChunkRecord>
struct PrepareConfig {
  using Dtype = Dtype_;
  using Record = Record_;
  static constexpr int kDim = kDim_;
  using Layout = SmemLayout<kChunk, kDim>;
  static constexpr int kThreads = 128;
  // Q and K; then in their place a matrix for each warp.
  static constexpr int kTiles = 2 * Layout::kBytes;
  static constexpr int kMatrices = kThreads / 32 * kMatrixBytes;
  static constexpr int kFirst = kTiles > kMatrices ? kTiles : kMatrices;
  static constexpr int kSharedMemory = kFirst + static_cast<int>(sizeof(ChunkRows));
};

// What a record's first matrix is made of X: elements are X's times factors of rows and columns.
template <class Record>
struct Solution;

template <>
struct Solution<ChunkRecord> {
  // Above it, what rounding leaves of the matrix is written too.
  static constexpr float kCareful = __builtin_huge_valf();
  static constexpr float kLargest = __builtin_huge_valf();
  static __device__ __forceinline__ uint16_t* matrix(ChunkRecord& record) { return record.update; }
  static __device__ __forceinline__ float row(float beta) { return -beta; }
  static __device__ __forceinline__ float column(float beta) { return beta; }
  static __device__ __forceinline__ float diagonal(float beta) { return beta; }
  // What an element, and the diagonal, add to the growth.
  static __device__ __forceinline__ float size(float element, float) { return fabsf(element); }
  static __device__ __forceinline__ float diagonal_size(float beta) { return fabsf(beta); }
  // Writes the vectors that other records do not have.
  static __device__ __forceinline__ void write_more(ChunkRecord&, int, float, float, float, float) {
  }
};

// The gates of a head's chunk as a lane loads them: of two tokens in a row.
struct LaneGates {
  bool exists[2];
  GateBits bits[2];

  __device__ __forceinline__ LaneGates(const FwdProblem& problem, const GatePlace& first,
                                       int32_t count) {
    int const token = static_cast<int>(threadIdx.x) % 32 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exists[i] = token + i < count;
      bits[i] =
          GateBits(problem, {first.batch, first.row + (exists[i] ? token + i : 0), first.head});
    }
  }
};

// Finds G and beta of a head, by one warp.
__device__ __forceinline__ void find_gates(const FwdProblem& problem, const LaneGates& gates,
                                           HeadRows& rows) {
  // Factors of D reach from 2^-60 to 2^60.
  constexpr float kFarthest = 60.f;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  float decay[2], beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    decay[i] = gates.exists[i] ? gates.bits[i].decay_log(problem) * (1.f / kLn2) : 0.f;
    beta[i] = gates.exists[i] ? gates.bits[i].beta_of(problem) : 0.f;
  }
  float const before = sum_before(decay[0] + decay[1]);
  float const sums[2] = {before + decay[0], before + (decay[0] + decay[1])};
  float const middle =
      0.5f * (__shfl_sync(0xffffffffu, sums[0], 0) + __shfl_sync(0xffffffffu, sums[1], 31));
  bool const near = fabsf(sums[0] - middle) <= kFarthest && fabsf(sums[1] - middle) <= kFarthest;
  bool const wide = !__all_sync(0xffffffffu, near);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rows.sums[2 * lane + i] = sums[i];
    rows.beta[2 * lane + i] = beta[i];
  }
  if (lane == 0) {
    rows.middle = middle;
    rows.wide = wide;
  }
}

// The vote tells the compiler that the answer is the warp's.
__device__ __forceinline__ bool is_wide(const HeadRows& head) {
  return __any_sync(0xffffffffu, head.wide != 0) != 0;
}

// Finds the other vectors of a head and writes the record's, by one warp.
template <class Record>
__device__ __forceinline__ void find_vectors(const ChunkRows& rows, HeadRows& head, float scale,
                                             Record& record) {
  float const last = head.sums[kChunk - 1];
  bool const wide = head.wide != 0;
#pragma unroll
  for (int row = static_cast<int>(threadIdx.x) % 32; row < kChunk; row += 32) {
    float const sum = head.sums[row], decay = exp2_approx(sum);
    float const norm_q = rows.norm_q[row], norm_k = rows.norm_k[row];
    record.a[row] = decay * norm_k;
    record.b[row] = exp2_approx(last - sum) * norm_k;
    record.c[row] = scale * decay * norm_q;
    Solution<Record>::write_more(record, row, head.beta[row], sum, norm_q, norm_k);
    float const of_column = wide ? 1.f : exp2_approx(head.middle - sum);
    head.decay[row] = wide ? 1.f : exp2_approx(sum - head.middle);
    head.columns[row] = Solution<Record>::column(head.beta[row]) * of_column;
    head.score_columns[row] = norm_k * of_column;
  }
  if (threadIdx.x % 32 == 0) record.decay = exp2_approx(last);
}

// The row of tiles of 8 x 8 that the lane's accumulators of this half are of. Every warp has eight
// rows from the start and eight from the end, as work is for what is below the diagonal.
__device__ __forceinline__ int tile_row_of(const Lane& at, int half) {
  return half == 0 ? at.warp : 7 - at.warp;
}

// The lane's address of operand A: the rows of tile_row_of().
template <class Layout>
__device__ __forceinline__ FragmentAddress<Layout> rows_address(uint32_t tile) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  return {tile + Layout::chunk_offset(8 * tile_row_of(Lane(), lane / 8 % 2) + lane % 8, lane / 16)};
}

__device__ __forceinline__ float2 pair_of(const float* vector, int first) {
  return *reinterpret_cast<const float2*>(vector + first);
}

using SquareRows = Accumulator<16, kChunk>;

// Writes factors of the warp's 16 rows of a tile: 1 / sqrt(sum of squares + 1e-6).
template <class Config>
__device__ __forceinline__ void find_norms(uint32_t tile, float* norms) {
  using Layout = typename Config::Layout;
  auto const rows = rows_address<Layout>(tile);
  float products[2][4] = {};
#pragma unroll
  for (int kk = 0; kk < Config::kDim / 16; ++kk) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, rows.chunk(2 * kk));
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // eight rows of operand A are B of their transpose
      ptx::mma_m16n8k16<typename Config::Dtype>(products[half], a, a[half], a[half + 2]);
    }
  }
  Lane const at;
  if (at.t != at.g / 2) return;  // the diagonal is others'
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float const even = products[half][2 * half], odd = products[half][2 * half + 1];
    norms[8 * tile_row_of(at, half) + at.g] = rsqrtf((at.g % 2 == 0 ? even : odd) + 1e-6f);
  }
}

// Stores N, of the warp's 16 rows: K K^T of normalised rows.
__device__ __forceinline__ void store_products(const SquareRows& kk, ChunkRows& rows) {
  Lane const at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = tile_row_of(at, half);
    float const factor = rows.norm_k[8 * m + at.g];
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      float2 const norm = pair_of(rows.norm_k, 8 * n + 2 * at.t);
      const float (&tile)[4] = kk.tile[0][n];
      // Factors first: N_ij and N_ji round to one number.
      rows.products.put(m, n, tile[2 * half] * (factor * norm.x),
                        tile[2 * half + 1] * (factor * norm.y));
    }
  }
}

// The place of the lane's word of tile n in a row of tiles of a matrix that is stored in rows of
// 128 bytes, permuted as by SWIZZLE_128B.
__device__ __forceinline__ unsigned char* place_of(unsigned char* tiles, const Lane& at, int n) {
  return tiles + ((128 * at.g + 16 * at.g + 4 * at.t) ^ (16 * n));
}
__device__ __forceinline__ void put_word(unsigned char* tiles, const Lane& at, int n,
                                         uint32_t word) {
  *reinterpret_cast<uint32_t*>(place_of(tiles, at, n)) = word;
}

// Copies eight rows of a matrix; zeros from column 8 `chunks` on.
__device__ __forceinline__ void copy_rows(uint16_t* to, const unsigned char* from, int chunks) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = lane; i < 64; i += 32) {
    uint4 words{};
    if ((i % 8 ^ i / 8) < chunks) words = reinterpret_cast<const uint4*>(from)[i];
    reinterpret_cast<uint4*>(to)[i] = words;
  }
}

// Writes the warp's 16 rows of P of a head; `scratch`: 2 KB.
template <class Dtype, bool kWide>
__device__ __forceinline__ void write_scores(const SquareRows& qk, float scale,
                                             const ChunkRows& rows, const HeadRows& head,
                                             unsigned char* scratch, uint16_t* scores) {
  Lane const at;
  float factors[2], row_sums[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const i = 8 * tile_row_of(at, half) + at.g;
    factors[half] = scale * rows.norm_q[i] * head.decay[i];
    row_sums[half] = head.sums[i];
  }
  float2 columns[kChunk / 8];
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    columns[n] = pair_of(head.score_columns, 8 * n + 2 * at.t);
  }
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    if (n > tile_row_of(at, 1)) break;
    float2 const column = columns[n];
    float2 const sums = kWide ? pair_of(head.sums, 8 * n + 2 * at.t) : float2{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const m = tile_row_of(at, half);
      if (n > m) continue;
      float first = factors[half] * column.x, second = factors[half] * column.y;
      if constexpr (kWide) {
        first *= exp2_approx(row_sums[half] - sums.x);
        second *= exp2_approx(row_sums[half] - sums.y);
      }
      first *= qk.tile[0][n][2 * half];
      second *= qk.tile[0][n][2 * half + 1];
      put_word(scratch + 1024 * half, at, n, Dtype::pack(first, second));
    }
  }
  // Above the diagonal there are no elements: 0, and not a product.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned char* const word = place_of(scratch + 1024 * half, at, tile_row_of(at, half));
    if (2 * at.t > at.g) *reinterpret_cast<uint32_t*>(word) = 0;
    if (2 * at.t == at.g) ptx::shared_store(ptx::smem_address(word) + 2, uint16_t{0});
  }
  __syncwarp();  // the rows are there
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = tile_row_of(at, half);
    copy_rows(scores + 8 * m * kChunk, scratch + 1024 * half, m + 1);
  }
}

// A record's first matrix of a head, made by one warp in its shared memory; kLow: what fp16 leaves
// of it.
template <class Record, bool kLow>
class SolutionWriter {
  using Of = Solution<Record>;
  const KeyProducts& products;
  const HeadRows& head;
  float* const row_totals;  // of the blocks on the diagonal
  unsigned char* const matrix;
  Lane const at;
  int const lane;
  bool const wide;
  uint32_t growth = 0;  // as bits, which sort as positive floats do and NaN behind them
  float largest = 0.f;

 public:
  __device__ __forceinline__ SolutionWriter(const KeyProducts& products, const HeadRows& head,
                                            float* row_totals, unsigned char* matrix)
      : products(products),
        head(head),
        row_totals(row_totals),
        matrix(matrix),
        at(ptx::thread_index()),
        lane(4 * at.g + at.t),
        wide(is_wide(head)) {}

  // Writes the matrix and gives the growth: the largest sum of a row.
  __device__ __forceinline__ float write(uint16_t* to) {
    DiagonalRows const x(products, head.beta, lane);
    put_row(x.upper, 0);
    put_row(x.lower, 8);
    __syncwarp();  // operands and totals of the blocks on the diagonal are there
    float totals[kBlocks][2];
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        totals[i][half] = at.t == 0 ? row_totals[kBlock * i + 8 * half + at.g] : 0.f;
      }
    }
    solve_below(
        products, operands(), head.beta, lane,
        [&](int i, int j, const float (&block)[2][4]) { put_block(i, j, block, totals[i]); });
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) add_total(quad_sum(totals[i][half]));
    }
    __syncwarp();  // the matrix is there
#pragma unroll
    for (int m = 0; m < kChunk / 8; ++m) {
      copy_rows(to + 8 * m * kChunk, matrix + 1024 * m, m / 2 * 2 + 2);
    }
    __syncwarp();  // it has been read
    if (largest > Of::kLargest) growth = __float_as_uint(infinity());
    growth = __reduce_max_sync(0xffffffffu, growth);
    return growth > __float_as_uint(infinity()) ? infinity() : __uint_as_float(growth);
  }

 private:
  __device__ __forceinline__ uint32_t pack(float first, float second) {
    return kLow ? pack_rest(first, second) : dtype::fp16::pack(first, second);
  }
  __device__ __forceinline__ SolutionMatrix operands() const { return {ptx::smem_address(matrix)}; }
  __device__ __forceinline__ void add_total(float total) {
    growth = max(growth, __float_as_uint(total));
  }
  __device__ __forceinline__ float add(float element, float beta) {
    if constexpr (Of::kLargest < __builtin_huge_valf()) largest = fmaxf(largest, fabsf(element));
    return Of::size(element, beta);
  }

  // Puts a row of X of a block on the diagonal, of whose columns all but kCount are 0.
  template <int kCount>
  __device__ __forceinline__ void put_row(const float (&x)[kCount], int below) {
    int const row = below + lane % 8, block = lane / 8, i = kBlock * block + row;
    float const beta = head.beta[i], factor = Of::row(beta) * head.decay[i], sum = head.sums[i];
    float total = Of::diagonal_size(beta);
    unsigned char* const to = matrix + 128 * i;
#pragma unroll
    for (int first = 0; first < kBlock; first += 8) {
      float eight[8] = {}, elements[8] = {}, of[8] = {};
      if (first < kCount) {
        int const column = kBlock * block + first;
        load_floats(elements, head.columns + column);
#pragma unroll
        for (int e = 0; e < 8; ++e) elements[e] *= factor;
        if (wide) {
          load_floats(of, head.sums + column);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            elements[e] *= first + e < row ? exp2_approx(sum - of[e]) : 0.f;
          }
        }
        load_floats(of, head.beta + column);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          eight[e] = x[(first + e) % kCount];
          elements[e] *= eight[e];
          total += add(elements[e], of[e]);
        }
      }
      operands().put_operands(block, row, first, eight, of);
      *reinterpret_cast<uint4*>(to + (((2 * block + first / 8) ^ (i & 7)) * 16)) = {
          pack(elements[0], elements[1]), pack(elements[2], elements[3]),
          pack(elements[4], elements[5]), pack(elements[6], elements[7])};
    }
    add_total(total);
    row_totals[i] = total;
    unsigned char* const diagonal = to + (((i / 8) ^ (i & 7)) * 16) + i % 8 * 2;
    ptx::shared_store(ptx::smem_address(diagonal),
                      static_cast<uint16_t>(dtype::fp16::pack(Of::diagonal(beta), 0.f)));
  }

  // Puts the lane's elements of a block of X below the diagonal.
  __device__ __forceinline__ void put_block(int i, int j, const float (&x)[2][4],
                                            float (&totals)[2]) {
    float2 columns[2], betas[2], sums[2];
    float factors[2], row_sums[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      int const column = kBlock * j + 8 * n + 2 * at.t, row = kBlock * i + 8 * n + at.g;
      columns[n] = pair_of(head.columns, column);
      betas[n] = pair_of(head.beta, column);
      factors[n] = Of::row(head.beta[row]) * head.decay[row];
      if (wide) {
        sums[n] = pair_of(head.sums, column);
        row_sums[n] = head.sums[row];
      }
    }
    float elements[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      int const n = e / 4, half = e / 2 % 2;
      elements[n][e % 4] = factors[half] * (e % 2 == 0 ? columns[n].x : columns[n].y);
    }
    if (wide) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        int const n = e / 4, half = e / 2 % 2;
        elements[n][e % 4] *= exp2_approx(row_sums[half] - (e % 2 == 0 ? sums[n].x : sums[n].y));
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const first = elements[n][2 * half] * x[n][2 * half];
        float const second = elements[n][2 * half + 1] * x[n][2 * half + 1];
        totals[half] += add(first, betas[n].x) + add(second, betas[n].y);
        put_word(matrix + 1024 * (2 * i + half), at, 2 * j + n, pack(first, second));
      }
    }
  }
};

// Writes a head's first matrix and its growth, by one warp.
template <class Record>
__device__ __forceinline__ void write_solution(const KeyProducts& products, const HeadRows& head,
                                               float* row_totals, unsigned char* matrix,
                                               Record& record) {
  using Of = Solution<Record>;
  float const growth =
      SolutionWriter<Record, false>(products, head, row_totals, matrix).write(Of::matrix(record));
  if (threadIdx.x % 32 == 0) record.growth = growth;
  if constexpr (Of::kCareful < __builtin_huge_valf()) {
    if (growth > Of::kCareful) {
      SolutionWriter<Record, true>(products, head, row_totals, matrix).write(Of::low(record));
    }
  }
}

// The grid: chunks of all sequences times heads of q and k times parts of their groups, on one
// axis.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 4)
    prepare_kernel(const __grid_constant__ PrepareArgs<typename Config::Record> args) {
  using Dtype = typename Config::Dtype;
  using Layout = typename Config::Layout;
  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdProblem& problem = args.problem;
  ptx::griddepcontrol_launch_dependents();  // the chains' blocks start as SMs become free
  uint32_t const heads_and_chunk = blockIdx.x / args.group_blocks;
  uint32_t const part = blockIdx.x - heads_and_chunk * args.group_blocks;
  uint32_t const slot = heads_and_chunk / static_cast<uint32_t>(problem.heads_qk);
  uint32_t const head_qk = heads_and_chunk - slot * problem.heads_qk;
  TileCoordinate const chunk = problem.rows.find(slot, problem.sequences, kChunk);
  Span const span = problem.rows.span(chunk.batch);
  int32_t const count = span.count - chunk.first;
  if (count <= 0) return;  // more chunks were launched than there are
  int64_t const batch = problem.rows.offsets == nullptr ? chunk.batch : 0;
  int64_t const row = int64_t{span.first} + chunk.first;

  // The shuffle tells the compiler that the index is warp-uniform.
  int const warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  int32_t const first_of_group = static_cast<int32_t>(part) * kHeadsAtOnce;
  int32_t const first_head = head_qk * problem.group + first_of_group;
  int32_t const heads = min(problem.group - first_of_group, kHeadsAtOnce);
  LaneGates const gates(problem, {batch, row, first_head + min(warp, heads - 1)}, count);
  auto load = [&](const Tensor& from, unsigned char* tile) {
    load_tile<Layout, Config::kThreads, true>(
        tile,
        from.data + batch * from.batch_stride + row * from.seq_stride + head_qk * from.head_stride,
        from.seq_stride, count, problem.head_dim);
  };
  load(problem.q, shared);
  load(problem.k, shared + Layout::kBytes);
  ptx::cp_async_commit();
  auto& rows = *reinterpret_cast<ChunkRows*>(shared + Config::kFirst);
  find_gates(problem, gates, rows.heads[warp]);  // while Q and K are under way
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q and K are there

  SquareRows qk, kk;
  uint32_t const q = ptx::smem_address(shared), k = q + Layout::kBytes;
  if (problem.qk_l2norm) {
    find_norms<Config>(q, rows.norm_q);
    find_norms<Config>(k, rows.norm_k);
  } else if (threadIdx.x < kChunk) {
    rows.norm_q[threadIdx.x] = rows.norm_k[threadIdx.x] = 1.f;
  }
  FragmentAddress<Layout> const columns{k + fragment_offset_b<Layout>()};
  gemm_nt<Dtype, Config::kDim>(qk, rows_address<Layout>(q), columns);
  gemm_nt<Dtype, Config::kDim>(kk, rows_address<Layout>(k), columns);
  __syncthreads();  // the norms are there; the tiles have been read
  store_products(kk, rows);
  typename Config::Record* const records =
      args.records + int64_t{slot} * problem.heads + first_head;
  if (warp < heads) find_vectors(rows, rows.heads[warp], problem.scale, records[warp]);
  __syncthreads();  // N and all vectors are there

  unsigned char* const matrix = shared + warp * kMatrixBytes;
  for (int32_t i = 0; i < heads; ++i) {
    const HeadRows& head = rows.heads[i];
    if (is_wide(head)) {
      write_scores<Dtype, true>(qk, problem.scale, rows, head, matrix + 2048 * i,
                                records[i].scores);
    } else {
      write_scores<Dtype, false>(qk, problem.scale, rows, head, matrix + 2048 * i,
                                 records[i].scores);
    }
  }
  __syncwarp();  // the scores have been read
  if (warp < heads)
    write_solution(rows.products, rows.heads[warp], rows.totals[warp], matrix, records[warp]);
}

}  // namespace flashvar::sm80::gated_delta_rule
