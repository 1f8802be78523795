// The results of a tile of few rows (fwd_few.cuh): those of its warps are merged in shared memory,
// and those of its splits, if they are a cluster, in the shared memory of its blocks.
#pragma once
#include <cstdint>

#include "attention/problem.h"
#include "attention/sinks.cuh"
#include "core/math.cuh"
#include "ptx/cluster.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/vectors.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/attention/fwd_few_consumer.cuh"
#include "sm90/attention/query_tile.cuh"

namespace flashvar::sm90::attention {

// A warp's or a block's results: rows of O in fp32, then of each row the maximum of its scores,
// then of each row the sum of P.
template <int kPitch, int kRows>
struct FewResults {
  uint32_t base;

  __device__ __forceinline__ uint32_t out(int row, int column) const {
    return base + (row * kPitch + column) * 4;
  }
  __device__ __forceinline__ uint32_t maximum(int row) const {
    return base + (kRows * kPitch + row) * 4;
  }
  __device__ __forceinline__ uint32_t sum(int row) const { return maximum(kRows + row); }
};

// Where the results of the call go, as it was before PackGQA. Small, and read first at the kernel's
// start: parameters that a block first reads at its end delay it.
struct FewOutput {
  Sequences queries;
  Tensor out;
  float* lse;
  int32_t heads, group;

  FewOutput() = default;
  explicit FewOutput(const FwdProblem& call)
      : queries(call.queries),
        out(call.out),
        lse(call.lse),
        heads(call.heads_q),
        group(call.group) {}

  // As FwdProblem::lse_row().
  __device__ __forceinline__ int64_t lse_row(uint32_t batch, uint32_t head, int32_t first) const {
    return queries.offsets != nullptr ? int64_t{head} * queries.total + first
                                      : (int64_t{batch} * heads + head) * queries.seqlen;
  }
};

// Where a row's results go: to a query and a head of the call. With PackGQA a row is a query of a
// member of the tile's group.
template <class Config>
struct FewRow {
  bool exists;
  uint32_t head;
  int64_t lse;
  uint16_t* out;

  __device__ __forceinline__ FewRow(const FewOutput& call, const QueryTile<Config>& tile,
                                    const KeySplits& splits, int32_t number) {
    bool const packed = splits.group_rows > 1, several = splits.row_shift > 0;
    int32_t const query = packed && !several ? 0 : tile.query(number);
    int32_t const member = packed ? number - (query << splits.row_shift) : 0;
    uint32_t const first = tile.head * (packed ? call.group : 1);
    *this = FewRow(call, tile.batch, call.queries.span(tile.batch), first + member, query);
    exists = exists && member < call.group;
  }

  __device__ __forceinline__ FewRow(const FewOutput& call, uint32_t batch, Span span,
                                    uint32_t head_, int32_t query)
      : exists(query < span.count), head(head_) {
    lse = call.lse_row(batch, head, span.first) + query;
    uint32_t const index = call.queries.offsets == nullptr ? batch : 0;
    out = call.out.data + index * call.out.batch_stride + head * call.out.head_stride +
          int64_t{span.first + query} * call.out.seq_stride;
  }
};

// Merges the results of a row: of its warps, or of the blocks of a cluster.
template <int kCount>
struct FewMerge {
  float weights[kCount];
  float highest = -infinity(), sum = 0.f;

  // `maxima`: of unscaled scores; -inf: no key was seen.
  __device__ __forceinline__ FewMerge(const float (&maxima)[kCount], const float (&sums)[kCount],
                                      float scale_log2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest = fmaxf(highest, maxima[i]);
    float const shift = highest == -infinity() ? 0.f : highest;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      weights[i] = exp2_approx((maxima[i] - shift) * scale_log2);
      sum += weights[i] * sums[i];
    }
  }

  // The natural-log LSE, and what to multiply sums by; 1 for rows without a visible key.
  __device__ __forceinline__ float lse(float scale_log2) const {
    return sum == 0.f ? -infinity() : highest * scale_log2 * kLn2 + __logf(sum);
  }
  __device__ __forceinline__ float inverse() const { return sum == 0.f ? 1.f : 1.f / sum; }
};

__device__ __forceinline__ float4 add_weighted(float4 total, float weight, float4 x) {
  return {total.x + weight * x.x, total.y + weight * x.y, total.z + weight * x.z,
          total.w + weight * x.w};
}
__device__ __forceinline__ float4 times(float4 x, float factor) {
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

// Merges and stores the results of a tile, by the warps that compute; `smem`: where they are.
template <class Config>
struct FewStore {
  using Dtype = typename Config::Dtype;
  static constexpr int kRows = Config::kBlockQ, kWarpRows = Config::kWarpRows;
  static constexpr int kKeyWarps = Config::kKeyWarps, kThreads = 32 * kFewWarps;
  using WarpResults = FewResults<Config::kPitch, kWarpRows>;
  using BlockResults = FewResults<Config::kPitch, kRows>;
  using Merge = FewMerge<kKeyWarps>;
  static constexpr int kLanes = kThreads / kRows;  // threads of a row
  const FewOutput& call;
  const FwdProblem& problem;
  const QueryTile<Config>& tile;
  uint32_t smem;
  bool in_cluster;

  __device__ __forceinline__ void operator()(const FewConsumer<Config>& consumer) const {
    ptx::named_barrier_sync(kFewResults, kThreads);  // all warps have read K and V
    write(consumer);
    ptx::named_barrier_sync(kFewResults, kThreads);  // the results of all warps are written
    int const row = ptx::thread_index() / kLanes;
    float maxima[kKeyWarps], sums[kKeyWarps];
#pragma unroll
    for (int i = 0; i < kKeyWarps; ++i) {
      WarpResults const from = of_warp(first_warp(row) + i);
      maxima[i] = ptx::shared_load(from.maximum(row_of_warp(row)));
      sums[i] = ptx::shared_load(from.sum(row_of_warp(row)));
    }
    Merge const merge(maxima, sums, problem.scale_log2);
    if (!in_cluster) {
      problem.splits.out != nullptr ? store_split(row, merge) : store_row(row, merge);
    } else {
      write_split(row, merge);
      ptx::cluster_sync();  // the results of all splits are written
      store_share();
      ptx::cluster_sync();  // the results of this split are read, before its block may exit
    }
  }

  // Stores rows of varlen queries that no tile has. By one warp of each block of the grid. After
  // PackGQA fwd_merge_kernel does it, where there is one.
  __device__ __forceinline__ void store_other_rows() const {
    const KeySplits& splits = problem.splits;
    bool const packed = splits.group_rows > 1, several = splits.row_shift > 0;
    if (packed && problem.splits.out != nullptr) return;
    zero_rows_of_no_sequence();
    Span const span = call.queries.span(tile.batch);
    int32_t const members = packed ? call.group : 1;
    int32_t const first = packed && !several ? 1 : kRows >> splits.row_shift;
    for (int32_t query = first; query < span.count; ++query) {
      for (int32_t member = 0; member < members; ++member) {
        store_nan(span, tile.head * members + member, query);
      }
    }
  }

 private:
  // All blocks of the grid share the rows: a head has several blocks, or a block several heads.
  __device__ __forceinline__ void zero_rows_of_no_sequence() const {
    int32_t const begin = call.queries.span(0).first;
    Span const last = call.queries.span(static_cast<uint32_t>(problem.batch) - 1);
    int32_t const inside = last.first + last.count - begin;
    int64_t const outside = int64_t{call.queries.total} - inside;
    if (outside == 0) return;
    uint32_t const heads = call.heads, blocks = max(gridDim.x / heads, 1u);  // of a head
    uint32_t const block = blockIdx.x / heads;
    if (block >= blocks) return;
    for (uint32_t head = blockIdx.x % heads; head < heads; head += gridDim.x) {
      for (int64_t i = block; i < outside; i += blocks) {
        Span const span{static_cast<int32_t>(i < begin ? i : i + inside), 1};
        fill(FewRow<Config>(call, 0, span, head, 0), 0.f, -infinity());
      }
    }
  }

  // For a row beyond max_seqlen_q, which no tile computes.
  __device__ __forceinline__ void store_nan(Span span, uint32_t head, int32_t query) const {
    float const nan = nanf("");
    if (problem.splits.out != nullptr) {  // what fwd_merge_kernel merges
      if (ptx::thread_index() % 32 == 0) problem.splits.lse[split_row(query)] = nan;
    } else if (tile.split == 0) {
      fill(FewRow<Config>(call, tile.batch, span, head, query), nan, nan);
    }
  }

  // By one warp.
  __device__ __forceinline__ void fill(const FewRow<Config>& row, float value, float lse) const {
    int const lane = ptx::thread_index() % 32;
    if (call.lse != nullptr && lane == 0) call.lse[row.lse] = lse;
    for (int32_t column = lane * 4; column < problem.head_dim_v; column += 128) {
      store_columns(row, column, {value, value, value, value});
    }
  }

  __device__ __forceinline__ WarpResults of_warp(int warp) const {
    return {smem + warp * Config::kWarpResults};
  }
  // The first of the warps that have a row, and the row's number there.
  static __device__ __forceinline__ int first_warp(int row) {
    return kRows == kWarpRows ? 0 : row / kWarpRows * kKeyWarps;
  }
  static __device__ __forceinline__ int row_of_warp(int row) {
    return kRows == kWarpRows ? row : row % kWarpRows;
  }
  __device__ __forceinline__ BlockResults of_block() const {
    return {smem + kFewWarps * Config::kWarpResults};
  }
  __device__ __forceinline__ bool is_first_of_row() const {
    return ptx::thread_index() % kLanes == 0;
  }

  // Writes a warp's results to shared memory.
  __device__ __forceinline__ void write(const FewConsumer<Config>& consumer) const {
    int const lane = ptx::thread_index() % 32;
    WarpResults const to = of_warp(ptx::thread_index() / 32);
#pragma unroll
    for (int j = 0; j < kWarpRows / 4; ++j) {
      int const row = j / 2 * 8 + lane % 4 * 2 + j % 2;
      float sum = consumer.row_sum[j / 2][j % 2];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      }
      if (lane < 4) {
        ptx::shared_store(to.maximum(row), __float_as_uint(consumer.running_max[j / 2][j % 2]));
        ptx::shared_store(to.sum(row), __float_as_uint(sum));
      }
#pragma unroll
      for (int d = 0; d < Config::kHeadDimV / 16; ++d) {
        const float (&x)[4] = consumer.rO[j / 2][d];
        ptx::shared_store(to.out(row, d * 16 + lane / 4), __float_as_uint(x[j % 2]));
        ptx::shared_store(to.out(row, d * 16 + lane / 4 + 8), __float_as_uint(x[2 + j % 2]));
      }
    }
  }

  // Calls use(column, four columns of O from there on) for the thread's columns of a row.
  template <class Use>
  __device__ __forceinline__ void for_columns(int row, const Merge& merge, float inverse,
                                              Use&& use) const {
    for (int32_t c = ptx::thread_index() % kLanes * 4; c < problem.head_dim_v; c += 4 * kLanes) {
      float4 total = {};
#pragma unroll
      for (int i = 0; i < kKeyWarps; ++i) {
        uint32_t const from = of_warp(first_warp(row) + i).out(row_of_warp(row), c);
        total = add_weighted(total, merge.weights[i], ptx::shared_load4(from));
      }
      use(c, times(total, inverse));
    }
  }

  // Stores a row of the call.
  __device__ __forceinline__ void store_row(int number, const Merge& merge) const {
    FewRow<Config> const row(call, tile, problem.splits, number);
    if (!row.exists) return;
    float lse = merge.lse(problem.scale_log2), inverse = merge.inverse();
    add_sink(sink_of(problem.sinks, row.head), lse, inverse);
    if (call.lse != nullptr && is_first_of_row()) call.lse[row.lse] = lse;
    for_columns(number, merge, inverse,
                [&](int32_t column, float4 x) { store_columns(row, column, x); });
  }
  __device__ __forceinline__ void store_columns(const FewRow<Config>& row, int32_t column,
                                                float4 x) const {
    *reinterpret_cast<uint2*>(row.out + column) = {Dtype::pack(x.x, x.y), Dtype::pack(x.z, x.w)};
  }

  // Stores a row of a split for fwd_merge_kernel.
  __device__ __forceinline__ void store_split(int row, const Merge& merge) const {
    if (tile.query(row) >= tile.mask.seqlen_q) return;
    int64_t const to = split_row(row);
    if (is_first_of_row()) problem.splits.lse[to] = merge.lse(problem.scale_log2);
    for_columns(row, merge, merge.inverse(), [&](int32_t column, float4 x) {
      *reinterpret_cast<float4*>(problem.splits.out + to * problem.head_dim_v + column) = x;
    });
  }
  __device__ __forceinline__ int64_t split_row(int32_t row) const {
    bool const varlen = problem.queries.offsets != nullptr;
    int64_t const head = varlen ? tile.head : int64_t{tile.batch} * problem.heads_q + tile.head;
    int64_t const rows = varlen ? problem.queries.total : problem.queries.seqlen;
    return (head * problem.splits.count + tile.split) * rows + tile.row_q + row;
  }

  // Writes a row of a split to shared memory, for the blocks of the cluster.
  __device__ __forceinline__ void write_split(int row, const Merge& merge) const {
    BlockResults const to = of_block();
    if (is_first_of_row()) {
      ptx::shared_store(to.maximum(row), __float_as_uint(merge.highest));
      ptx::shared_store(to.sum(row), __float_as_uint(merge.sum));
    }
    for_columns(row, merge, 1.f, [&](int32_t column, float4 x) {
      ptx::shared_store(to.out(row, column), x.x, x.y, x.z, x.w);
    });
  }

  // Merges and stores this block's share of the cluster's results.
  __device__ __forceinline__ void store_share() const {
    constexpr int kCount = kMaxCluster;
    int32_t const count = problem.splits.count, parts = problem.head_dim_v / 4;
    BlockResults const from = of_block();
    for (int32_t i = tile.split * kThreads + ptx::thread_index(); i < kRows * parts;
         i += kThreads * count) {
      int32_t const number = i / parts, column = (i - number * parts) * 4;
      FewRow<Config> const row(call, tile, problem.splits, number);
      if (!row.exists) continue;
      float maxima[kCount], sums[kCount];
      float4 x[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        maxima[j] = -infinity(), sums[j] = 0.f, x[j] = {};
        if (j >= count) continue;
        maxima[j] = ptx::cluster_load(ptx::in_cta(from.maximum(number), j));
        sums[j] = ptx::cluster_load(ptx::in_cta(from.sum(number), j));
        x[j] = ptx::cluster_load4(ptx::in_cta(from.out(number, column), j));
      }
      FewMerge<kCount> const merge(maxima, sums, problem.scale_log2);
      float lse = merge.lse(problem.scale_log2), inverse = merge.inverse();
      add_sink(sink_of(problem.sinks, row.head), lse, inverse);
      if (call.lse != nullptr && column == 0) call.lse[row.lse] = lse;
      float4 total = {};
#pragma unroll
      for (int j = 0; j < kCount; ++j) total = add_weighted(total, merge.weights[j], x[j]);
      store_columns(row, column, times(total, inverse));
    }
  }
};

}  // namespace flashvar::sm90::attention
