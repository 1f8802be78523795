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
  Record* records;  // [chunk][head]
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
  float totals[kChunk];         // of absolute values in rows of the first matrix, of its blocks on
                                // the diagonal
  float middle;                 // what D's factors take from G
  int wide;
  int unused[2];
};

// The chunk's shared memory behind the tiles.
struct ChunkRows {
  KeyProducts products;
  float norm_q[kChunk], norm_k[kChunk];  // factors of rows: 1 where they are not normalised
  GatePlace place;                       // of the first head
  int64_t count;                         // rows
  HeadRows heads[kHeadsAtOnce];
};

// A record's matrix, while a warp writes it; it is the warp's scratch too.
inline constexpr int kMatrixBytes = kChunk * kChunk * 2;
static_assert(DiagonalOperands::kBytes <= kMatrixBytes);

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
  // More registers than those of four blocks are of use where shared memory leaves no room for
  // them.
  static constexpr int kBlocksPerSm = kSharedMemory > 64 * 1024 ? 2 : 4;
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
  static __device__ __forceinline__ uint16_t* low(ChunkRecord& record) { return record.update; }
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

// Finds G and beta of a head, by one warp: each lane has two tokens in a row.
__device__ __forceinline__ void find_gates(const FwdProblem& problem, const GatePlace& first,
                                           int32_t count, HeadRows& rows) {
  // Factors of D reach from 2^-60 to 2^60.
  constexpr float kFarthest = 60.f;
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
      rows.products.put(m, n, tile[2 * half] * factor * norm.x,
                        tile[2 * half + 1] * factor * norm.y);
    }
  }
}

// The place of the lane's word of a row of a matrix that is stored in rows of 128 bytes, permuted
// as by SWIZZLE_128B.
__device__ __forceinline__ void put_word(unsigned char* row, const Lane& at, int n, uint32_t word) {
  *reinterpret_cast<uint32_t*>(row + ((n ^ at.g) * 16) + 4 * at.t) = word;
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

// Writes the warp's 16 rows of P of a head, `factors` those of the rows; `scratch`: 2 KB.
template <class Dtype, bool kWide>
__device__ __forceinline__ void write_scores(const SquareRows& qk, const float (&factors)[2],
                                             const HeadRows& head, unsigned char* scratch,
                                             uint16_t* scores) {
  Lane const at;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = tile_row_of(at, half), i = 8 * m + at.g;
    float const factor = factors[half] * head.decay[i], sum = head.sums[i];
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      if (n > m) break;
      int const j = 8 * n + 2 * at.t;
      float2 const column = pair_of(head.score_columns, j);
      float first = factor * column.x, second = factor * column.y;
      if constexpr (kWide) {
        float2 const sums = pair_of(head.sums, j);
        first *= exp2_approx(sum - sums.x);
        second *= exp2_approx(sum - sums.y);
      }
      first *= qk.tile[0][n][2 * half];
      second *= qk.tile[0][n][2 * half + 1];
      if (n == m) {  // above the diagonal there are no elements: 0, and not a product
        if (2 * at.t > at.g) first = 0.f;
        if (2 * at.t + 1 > at.g) second = 0.f;
      }
      put_word(scratch + 1024 * half + 128 * at.g, at, n, Dtype::pack(first, second));
    }
  }
  __syncwarp();  // the rows are there
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const m = tile_row_of(at, half);
    copy_rows(scores + 8 * m * kChunk, scratch + 1024 * half, m + 1);
  }
}

// What fp16 leaves of two numbers.
__device__ __forceinline__ uint32_t pack_rest(float first, float second) {
  uint32_t const word = dtype::fp16::pack(first, second);
  return dtype::fp16::pack(first - dtype::fp16::unpack(static_cast<uint16_t>(word)),
                           second - dtype::fp16::unpack(static_cast<uint16_t>(word >> 16)));
}

// A record's first matrix of a head, made by one warp in its shared memory.
template <class Record>
class SolutionWriter {
  using Of = Solution<Record>;
  const KeyProducts& products;
  HeadRows& head;
  unsigned char* const matrix;
  bool const low, wide;
  uint32_t growth = 0;  // as bits, which sort as positive floats do and NaN behind them
  float largest = 0.f;

 public:
  // low: what fp16 leaves, instead of the matrix.
  __device__ __forceinline__ SolutionWriter(const KeyProducts& products, HeadRows& head,
                                            unsigned char* matrix, bool low)
      : products(products), head(head), matrix(matrix), low(low), wide(head.wide != 0) {}

  // Writes the matrix and gives the growth: the largest sum of a row.
  __device__ __forceinline__ float write(uint16_t* to) {
    DiagonalRows const x(products, head.beta);
    DiagonalOperands const operands(x, head.beta, ptx::smem_address(matrix));
    put_row(x.upper, 0);
    put_row(x.lower, 8);
    __syncwarp();  // totals of the blocks on the diagonal are there
    Lane const at;
    float totals[kBlocks][2];
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        totals[i][half] = at.t == 0 ? head.totals[kBlock * i + 8 * half + at.g] : 0.f;
      }
    }
    solve_below(products, operands, head.beta, [&](int i, int j, const float (&block)[2][4]) {
      put_block(i, j, block, totals[i]);
    });
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
    return low ? pack_rest(first, second) : dtype::fp16::pack(first, second);
  }
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
    int const lane = static_cast<int>(threadIdx.x) % 32;
    int const row = below + lane % 8, block = lane / 8, i = kBlock * block + row;
    float const beta = head.beta[i], factor = Of::row(beta) * head.decay[i], sum = head.sums[i];
    float total = Of::diagonal_size(beta);
    unsigned char* const to = matrix + 128 * i;
#pragma unroll
    for (int first = 0; first < kBlock; first += 8) {
      uint32_t words[4] = {};
      if (first < kCount) {
        int const column = kBlock * block + first;
        float elements[8], of[8];
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
          elements[e] *= x[(first + e) % kCount];
          total += add(elements[e], of[e]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) words[e] = pack(elements[2 * e], elements[2 * e + 1]);
      }
      *reinterpret_cast<uint4*>(to + (((2 * block + first / 8) ^ (i & 7)) * 16)) = {
          words[0], words[1], words[2], words[3]};
    }
    add_total(total);
    head.totals[i] = total;
    auto const diagonal = static_cast<uint16_t>(dtype::fp16::pack(Of::diagonal(beta), 0.f));
    *reinterpret_cast<uint16_t*>(to + (((i / 8) ^ (i & 7)) * 16) + i % 8 * 2) = diagonal;
  }

  // Puts the lane's elements of a block of X below the diagonal.
  __device__ __forceinline__ void put_block(int i, int j, const float (&x)[2][4],
                                            float (&totals)[2]) {
    Lane const at;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = kBlock * i + 8 * half + at.g;
      float const factor = Of::row(head.beta[row]) * head.decay[row];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        int const column = kBlock * j + 8 * n + 2 * at.t;
        float2 const columns = pair_of(head.columns, column), beta = pair_of(head.beta, column);
        float first = factor * columns.x, second = factor * columns.y;
        if (wide) {
          float2 const sums = pair_of(head.sums, column);
          first *= exp2_approx(head.sums[row] - sums.x);
          second *= exp2_approx(head.sums[row] - sums.y);
        }
        first *= x[n][2 * half];
        second *= x[n][2 * half + 1];
        totals[half] += add(first, beta.x) + add(second, beta.y);
        put_word(matrix + 128 * row, at, 2 * j + n, pack(first, second));
      }
    }
  }
};

// Writes a head's first matrix and its growth, by one warp.
template <class Record>
__device__ __forceinline__ void write_solution(const KeyProducts& products, HeadRows& head,
                                               unsigned char* matrix, Record& record) {
  using Of = Solution<Record>;
  bool low = false;
  while (true) {
    SolutionWriter<Record> writer(products, head, matrix, low);
    float const growth = writer.write(low ? Of::low(record) : Of::matrix(record));
    if (!low && threadIdx.x % 32 == 0) record.growth = growth;
    if (low || growth <= Of::kCareful) break;
    low = true;
  }
}

// The grid: chunks of all sequences times heads of q and k, on one axis.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    prepare_kernel(const __grid_constant__ PrepareArgs<typename Config::Record> args) {
  using Dtype = typename Config::Dtype;
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
  auto find = [&](int32_t first, const GatePlace& place, int32_t rows_left) {
    if (first + warp < problem.group) {
      find_gates(problem, {place.batch, place.row, place.head + first + warp}, rows_left,
                 rows.heads[warp]);
    }
  };
  GatePlace const place{batch, row, first_head};
  if (threadIdx.x == 0) {
    rows.place = place;
    rows.count = count;
  }
  find(0, place, count);  // while Q and K are under way
  ptx::cp_async_wait<0>();
  __syncthreads();  // Q and K are there

  SquareRows qk;
  {
    SquareRows kk;
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
  }

  unsigned char* const matrix = shared + warp * kMatrixBytes;
  Record* const records = args.records + int64_t{slot} * problem.heads + first_head;
  auto find_all = [&](int32_t first) {
    __syncwarp();  // the gates are found
    if (first + warp < problem.group) {
      find_vectors(rows, rows.heads[warp], problem.scale, records[first + warp]);
    }
  };
  int32_t first = 0;
  while (true) {
    find_all(first);
    __syncthreads();  // N and all vectors are there
    Lane const at;
    float const factors[2] = {problem.scale * rows.norm_q[8 * tile_row_of(at, 0) + at.g],
                              problem.scale * rows.norm_q[8 * tile_row_of(at, 1) + at.g]};
    int32_t const heads = min(problem.group - first, kHeadsAtOnce);
    for (int32_t i = 0; i < heads; ++i) {
      const HeadRows& head = rows.heads[i];
      uint16_t* const scores = records[first + i].scores;
      if (head.wide == 0) {
        write_scores<Dtype, false>(qk, factors, head, matrix + 2048 * i, scores);
      } else {
        write_scores<Dtype, true>(qk, factors, head, matrix + 2048 * i, scores);
      }
    }
    if (first + kHeadsAtOnce >= problem.group) break;
    first += kHeadsAtOnce;
    __syncthreads();  // the vectors and the scores have been read
    find(first, rows.place, static_cast<int32_t>(rows.count));
  }
  __syncwarp();  // the scores have been read
  // The last heads' vectors are still there, and others are not needed together.
  while (true) {
    if (first + warp < problem.group) {
      write_solution(rows.products, rows.heads[warp], matrix, records[first + warp]);
    }
    if (first == 0) break;
    first -= kHeadsAtOnce;
    if (first + 2 * kHeadsAtOnce >= problem.group) {
      __syncthreads();  // the other warps have read the vectors for their scores
    }
    find(first, rows.place, static_cast<int32_t>(rows.count));
    find_all(first);
    __syncwarp();  // the vectors are there
  }
}

}  // namespace flashvar::sm80::gated_delta_rule
