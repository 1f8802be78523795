// Merges the results of the forward's splits (key_splits.h): the weight of a split is its share of
// the sum of exponentials. After PackGQA a row goes to the query and head of the call that it
// stands for. Launched after the forward, as a programmatic dependent launch where the architecture
// has it.
#pragma once
#include <cstdint>

#include "attention/outside_rows.cuh"
#include "attention/problem.h"
#include "attention/sinks.cuh"
#include "core/kernel_facts.h"
#include "core/launch.h"
#include "core/math.cuh"
#include "core/quad.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::attention {

inline constexpr int kMergeWarps = 4;

struct FwdMergeArgs {
  FwdProblem problem;     // the call's, before PackGQA, with the forward's splits
  int32_t tiles;          // of rows, per head, over all batches
  int32_t warps_per_row;  // 1 or kMergeWarps: warps that share the splits of a row
  bool aligned;           // output rows start at multiples of 8 bytes
};

// Where the first split's results for a row of the call are in the workspace, and the distance to
// those of the next split, in rows.
struct FirstSplit {
  int64_t row, pitch;

  // `in_head`: the row in q's sequence dimension.
  __device__ __forceinline__ FirstSplit(const FwdProblem& problem, uint32_t head, uint32_t batch,
                                        int64_t in_head) {
    uint32_t const group = problem.group;
    int32_t const group_rows = problem.splits.group_rows;
    bool const varlen = problem.queries.offsets != nullptr;
    if (group_rows > 1) {  // PackGQA; of varlen queries there is one per sequence
      pitch = int64_t{varlen ? 1 : problem.queries.seqlen} * group_rows;
      int64_t const of_head = int64_t{batch} * (problem.heads_q / group) + head / group;
      row = of_head * problem.splits.count * pitch + (varlen ? 0 : in_head * group_rows) +
            head % group;
    } else {
      pitch = varlen ? problem.queries.total : problem.queries.seqlen;
      int64_t const of_head = varlen ? head : int64_t{batch} * problem.heads_q + head;
      row = of_head * problem.splits.count * pitch + in_head;
    }
  }
};

// One block per head and tile of kMergeWarps / warps_per_row rows. A lane has four columns of every
// 128.
template <class Dtype>
__global__ void __launch_bounds__(32 * kMergeWarps)
    fwd_merge_kernel(const __grid_constant__ FwdMergeArgs args) {
  constexpr int kColumns = 4, kAtOnce = 4;
  __shared__ float4 sums[kMergeWarps][32];
  const FwdProblem& problem = args.problem;
  int32_t const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t const rows = kMergeWarps / args.warps_per_row, count = problem.splits.count;
  uint32_t const head = blockIdx.x / args.tiles;
  TileCoordinate const tile =
      problem.queries.find(blockIdx.x % args.tiles, static_cast<uint32_t>(problem.batch), rows);
  Span const span = problem.queries.span(tile.batch);
  int32_t const row = tile.first + warp / args.warps_per_row;
  bool const exists = row < span.count;
  // Where the row does not exist, the warp reads row 0, which does, and stores nothing.
  int64_t const in_head = exists ? int64_t{span.first} + row : 0;
  FirstSplit const first(problem, head, tile.batch, in_head);
  int64_t const pitch = first.pitch;
  const float* const lses = problem.splits.lse + first.row;

  ptx::griddepcontrol_wait();  // the forward has stored all splits
  if (problem.splits.query_offsets != nullptr && blockIdx.x % args.tiles == 0) {
    store_outside_rows(problem, head, warp, kMergeWarps);
  }
  float highest = -infinity();
  for (int32_t i = lane; i < count; i += 32) highest = fmaxf(highest, lses[i * pitch]);
  highest = warp_max(highest);
  float const shift = highest == -infinity() ? 0.f : highest;
  float sum = 0.f;
  for (int32_t i = lane; i < count; i += 32) sum += __expf(lses[i * pitch] - shift);
  sum = warp_sum(sum);
  bool const empty = sum == 0.f;
  float lse = empty ? -infinity() : shift + __logf(sum);
  float inverse = empty ? 1.f : 1.f / sum;
  add_sink(sink_of(problem.sinks, head), lse, inverse);
  // max_seqlen_q is 1. A second query of a sequence has no results, and gets NaN.
  if (problem.splits.query_offsets != nullptr && row > 0) lse = inverse = nanf("");
  if (problem.lse != nullptr && exists && threadIdx.x % (32 * args.warps_per_row) == 0) {
    problem.lse[problem.lse_row(tile.batch, head, span.first) + row] = lse;
  }

  uint16_t* const out = problem.out.data + tile.batch * problem.out.batch_stride +
                        head * problem.out.head_stride + in_head * problem.out.seq_stride;
  for (int32_t start = 0; start < problem.head_dim_v; start += 32 * kColumns) {
    int32_t const column = start + lane * kColumns;
    bool const stores = column < problem.head_dim_v;
    const float* const from =
        problem.splits.out + first.row * problem.head_dim_v + (stores ? column : 0);
    float4 total = {};
#pragma unroll kAtOnce
    for (int32_t i = warp % args.warps_per_row; i < count; i += args.warps_per_row) {
      float const weight = __expf(lses[i * pitch] - shift);
      float4 const x = *reinterpret_cast<const float4*>(from + i * pitch * problem.head_dim_v);
      total = {total.x + weight * x.x, total.y + weight * x.y, total.z + weight * x.z,
               total.w + weight * x.w};
    }
    if (args.warps_per_row > 1) {
      sums[warp][lane] = total;
      __syncthreads();  // the sums of all warps are written
      total = sums[0][lane];
#pragma unroll
      for (int other = 1; other < kMergeWarps; ++other) {
        float4 const x = sums[other][lane];
        total = {total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w};
      }
      __syncthreads();  // the sums are read
    }
    if (!exists || !stores || warp % args.warps_per_row != 0) continue;
    uint2 const words = {Dtype::pack(total.x * inverse, total.y * inverse),
                         Dtype::pack(total.z * inverse, total.w * inverse)};
    if (args.aligned) {
      *reinterpret_cast<uint2*>(out + column) = words;
    } else {
      const uint32_t pairs[2] = {words.x, words.y};
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        out[column + i] = static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16));
      }
    }
  }
}

constexpr KernelFacts fwd_merge_facts(const char* row) {
  return KernelFactsMaker{row, "simt",
                          "after a forward with split-KV, or with PackGQA of varlen queries, of "
                          "several queries or with sinks"}
      .make("fwd_merge_kernel", 32 * kMergeWarps, 0, kMergeWarps);
}

template <class Target, class Dtype>
cudaError_t launch_fwd_merge(FwdProblem problem, const KeySplits& splits, int device,
                             cudaStream_t stream) {
  problem.splits = splits;
  // With many splits, or one row, all warps of a block share a row, so that more splits are in
  // flight.
  bool const whole_block = splits.count >= 2 * kMergeWarps || problem.queries.seqlen == 1;
  int32_t const warps_per_row = whole_block ? kMergeWarps : 1;
  int64_t const tiles = problem.queries.tiles(problem.batch, kMergeWarps / warps_per_row);
  if (tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  FwdMergeArgs const args{problem, static_cast<int32_t>(tiles), warps_per_row,
                          rows_are_aligned(problem.out)};
  LaunchShape const shape{tiles * problem.heads_q, 32 * kMergeWarps, 0,
                          Target::kArchitecture >= 90};
  return launch_kernel<fwd_merge_kernel<Dtype>>(args, shape, device, stream);
}

}  // namespace flashvar::attention
