// The backward. With c_i = grad_out . outs[i] and delta = sum_i w_i c_i,
//   grad_outs[i] = w_i grad_out,  grad_lses[i] = w_i (c_i - delta + grad_lse):
// the merged out is not read, and its rounding costs nothing. Without grad_lses nor are outs.
#pragma once
#include <cstdint>

#include "merge_states/chunk.cuh"
#include "merge_states/row.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::merge_states {

// What a part has of a row's sum. A part that counts may have so little that its share rounds to 0.
struct Weight {
  bool counts;
  float share;  // 0 where the part does not count, also in rows without a finite sum

  __device__ __forceinline__ Weight(float lse, float base, float scale) {
    float const exp = exp_from(lse, base);
    counts = exp != 0.f;
    share = counts ? exp * scale : 0.f;
  }

  __device__ __forceinline__ float times(float value) const { return counts ? share * value : 0.f; }
};

template <class Args>
__device__ __forceinline__ float sum_of(const Args& args, const Row& row, int64_t offset,
                                        float base, float* shared) {
  float sum = 0.f;
  int const groups = args.teams.groups;
  for (int first = row.group; first < args.parts; first += kBatch * groups) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      sum += exp_from(load_lse(args, first + b * groups, offset), base);
    }
  }
  return combine_groups(row, args.teams, sum, shared, [](float a, float b) { return a + b; });
}

template <int kElements>
__device__ __forceinline__ float dot(const float (&a)[kElements], const float (&b)[kElements],
                                     int lanes) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum = fmaf(a[i], b[i], sum);
  for (int step = 1; step < lanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// Rows that are not aligned take more registers: with a fourth block per multiprocessor fp16
// spills.
template <class Dtype, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? 4 : 3)
    bwd_kernel(const __grid_constant__ BwdArgs<typename Dtype::Word> args) {
  using C = Chunk<Dtype>;
  __shared__ float shared_team[kThreads];
  ptx::griddepcontrol_launch_dependents();
  Row const row(args);
  int64_t const out_offset = row.offset(args.outs.strides);
  int64_t const lse_offset = row.offset(args.lses.strides);
  int64_t const place = row.offset(args.lse_strides);
  int64_t const grad_offset = row.offset(args.grad_outs.strides);
  int const groups = args.teams.groups, lanes = args.teams.lanes;

  ptx::griddepcontrol_wait();
  float const base = base_of(args, row, lse_offset, shared_team);
  float const sum = sum_of(args, row, lse_offset, base, shared_team);
  float const scale = sum == 0.f ? 0.f : 1.f / sum;
  float const grad_lse = args.grad_lse == nullptr ? 0.f : args.grad_lse[place];

  // c_i is kept in grad_lses, by the lane that reads it again.
  bool const of_lses = args.grad_lses != nullptr;
  auto is_mine = [&](int part) {
    return row.valid && part < args.parts && part / groups % lanes == row.lane;
  };
  auto slot = [&](int part) { return args.grad_lses + part * args.row_count + place; };

  float delta = 0.f;
  int const width = lanes * C::kElements;
  for (int start = 0; start == 0 || start < args.head_dim; start += width) {
    int const column = start + row.lane * C::kElements;
    int const count = args.head_dim - column;
    float grad_out[C::kElements];
    C chunk;
    chunk.template load<kAligned>(args.grad_out.data + row.offset(args.grad_out.strides) + column,
                                  count);
    chunk.unpack(grad_out);
    // The same number of steps in all groups, for the shuffles.
    for (int step = 0; step < args.parts; step += kBatch * groups) {
      C chunks[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        int const part = step + row.group + b * groups;
        bool const wanted = of_lses && part < args.parts;
        const auto* const from = wanted ? args.outs.part(part) + out_offset + column : nullptr;
        chunks[b].template load<kAligned>(from, wanted ? count : 0);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        int const part = step + row.group + b * groups;
        Weight const weight(load_lse(args, part, lse_offset), base, scale);
        float values[C::kElements];
        if (of_lses) {
          chunks[b].unpack(values);
          float product = dot(grad_out, values, lanes);
          product = weight.counts ? product : 0.f;
          delta = fmaf(weight.share, product, delta);
          if (is_mine(part)) *slot(part) = start == 0 ? product : *slot(part) + product;
        }
        if (!row.valid || part >= args.parts || !args.writes(part)) continue;
#pragma unroll
        for (int i = 0; i < C::kElements; ++i) values[i] = weight.times(grad_out[i]);
        chunk.pack(values);
        chunk.template store<kAligned>(args.grad_of(part) + grad_offset + column, count);
      }
    }
  }
  if (!of_lses) return;
  delta =
      combine_groups(row, args.teams, delta, shared_team, [](float a, float b) { return a + b; });
  for (int part = row.group; part < args.parts; part += groups) {
    if (!is_mine(part)) continue;
    Weight const weight(load_lse(args, part, lse_offset), base, scale);
    *slot(part) = weight.times(*slot(part) - delta + grad_lse);
  }
}

}  // namespace flashvar::merge_states
