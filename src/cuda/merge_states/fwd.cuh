// The forward: out = sum_i w_i outs[i] and its log-sum-exp. Bound by memory: each thread sums one
// chunk of 16 bytes over the parts, or over its team's share of them, kBatch loads at a time.
#pragma once
#include <cstdint>

#include "merge_states/chunk.cuh"
#include "merge_states/row.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::merge_states {

// Adds up the teams' sums of a chunk; right in the first group's threads. Precondition: as of
// combine_groups; `shared` has kElements floats per thread.
template <int kElements>
__device__ __forceinline__ void add_groups(const Row& row, const Teams& teams,
                                           float (&sums)[kElements], float* shared) {
  if (teams.groups == 1) return;
  __syncthreads();  // the last reads of `shared`
#pragma unroll
  for (int i = 0; i < kElements; ++i) shared[i * kThreads + threadIdx.x] = sums[i];
  __syncthreads();
  if (row.group != 0) return;
  int const step = teams.rows() * teams.lanes;
  for (int group = 1; group < teams.groups; ++group) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sums[i] += shared[i * kThreads + threadIdx.x + group * step];
    }
  }
}

template <class Dtype, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? 5 : 4)
    fwd_kernel(const __grid_constant__ FwdArgs<typename Dtype::Word> args) {
  using C = Chunk<Dtype>;
  __shared__ float shared_team[kThreads];
  __shared__ float shared_sums[C::kElements * kThreads];
  ptx::griddepcontrol_launch_dependents();
  Row const row(args);
  int64_t const out_offset = row.offset(args.outs.strides);
  int64_t const lse_offset = row.offset(args.lses.strides);
  int const groups = args.teams.groups;

  C chunks[kBatch];
  auto load = [&](int first, int column) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      int const part = first + b * groups;
      bool const wanted = part < args.parts && row.group < groups;
      const auto* const from = wanted ? args.outs.part(part) + out_offset + column : nullptr;
      chunks[b].template load<kAligned>(from, wanted ? args.head_dim - column : 0);
    }
  };

  ptx::griddepcontrol_wait();
  int column = row.lane * C::kElements;
  load(row.group, column);  // in flight while the weights are found
  float const base = base_of(args, row, lse_offset, shared_team);

  // One pass for head dims up to a team's width. The first pass writes the log-sum-exp.
  int const width = args.teams.lanes * C::kElements;
  for (int start = 0; start == 0 || start < args.head_dim; start += width, column += width) {
    float sum = 0.f;
    float sums[C::kElements] = {};
    if (start > 0) load(row.group, column);
    for (int first = row.group; first < args.parts; first += kBatch * groups) {
      if (first != row.group) load(first, column);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        float const weight = exp_from(load_lse(args, first + b * groups, lse_offset), base);
        float values[C::kElements];
        chunks[b].unpack(values);
        sum += weight;
#pragma unroll
        for (int i = 0; i < C::kElements; ++i) {
          sums[i] = weight == 0.f ? sums[i] : fmaf(weight, values[i], sums[i]);
        }
      }
    }
    sum = combine_groups(row, args.teams, sum, shared_team, [](float a, float b) { return a + b; });
    add_groups(row, args.teams, sums, shared_sums);
    if (!row.valid || row.group != 0) continue;
    float const scale = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (int i = 0; i < C::kElements; ++i) sums[i] *= scale;
    C out;
    out.pack(sums);
    out.template store<kAligned>(args.out.data + row.offset(args.out.strides) + column,
                                 args.head_dim - column);
    if (start == 0 && row.lane == 0 && args.lse != nullptr) {
      float const lse = base == infinity() ? base : base + logf(sum);
      args.lse[row.offset(args.lse_strides)] = lse;
    }
  }
}

}  // namespace flashvar::merge_states
