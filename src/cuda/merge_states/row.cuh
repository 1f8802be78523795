// A thread's row of merge_states, and the weights of its parts.
#pragma once
#include <cstdint>

#include "core/math.cuh"
#include "merge_states/args.h"
#include "ptx/max_nan.cuh"

namespace flashvar::merge_states {

// A part whose lse is lower than the row's highest by more than this has no weight: e^-103.97
// rounds to 2^-149, the least that fp32 holds, and e^-103.98 to 0. Every backend compares with this
// number, so that none of them reads what another ignores.
inline constexpr float kLowest = -103.97f;

struct Row {
  int32_t lane;   // of the team
  int32_t group;  // of the row's teams
  int32_t place;  // among the block's rows
  bool valid;     // else its reads are those of the last row, and it writes nothing
  uint32_t outer, middle, inner;

  template <class Args>
  __device__ __forceinline__ explicit Row(const Args& args) {
    int32_t const rows = args.teams.rows();
    int32_t const team = threadIdx.x / args.teams.lanes;
    lane = threadIdx.x % args.teams.lanes;
    place = team % rows;
    group = team / rows;
    int64_t const wanted = int64_t{blockIdx.x} * rows + place;
    valid = wanted < args.row_count && group < args.teams.groups;
    uint64_t const row = wanted < args.row_count ? wanted : args.row_count - 1;
    // The compiler divides 32 bits where they hold the number.
    uint64_t const beyond = row / args.inner;
    inner = static_cast<uint32_t>(row - beyond * args.inner);
    outer = static_cast<uint32_t>(beyond / args.middle);
    middle = static_cast<uint32_t>(beyond - uint64_t{outer} * args.middle);
  }

  __device__ __forceinline__ int64_t offset(const RowStrides& strides) const {
    return outer * strides.outer + middle * strides.middle + inner * strides.inner;
  }
};

// lse of a part, -inf beyond the last.
template <class Args>
__device__ __forceinline__ float load_lse(const Args& args, int part, int64_t offset) {
  return part < args.parts ? __ldg(args.lses.part(part) + offset) : -infinity();
}

// exp(lse - base): 0 of a part that counts for nothing and of no other. It may be denormal. -inf
// counts for nothing whatever the base is.
__device__ __forceinline__ float exp_from(float lse, float base) {
  float const below = lse - base;
  return lse == -infinity() || below < kLowest ? 0.f : exp2f(below * (1.f / kLn2));
}

// Combines one value of each of a row's teams, in the order of groups. Precondition: all threads of
// the block call it; `shared` has a float per team and is free.
template <class Combine>
__device__ __forceinline__ float combine_groups(const Row& row, const Teams& teams, float value,
                                                float* shared, Combine combine) {
  if (teams.groups == 1) return value;
  int32_t const rows = teams.rows();
  bool const is_team = row.group < teams.groups;
  __syncthreads();  // the last reads of `shared`
  if (row.lane == 0 && is_team) shared[row.group * rows + row.place] = value;
  __syncthreads();
  value = shared[row.place];
  for (int group = 1; group < teams.groups; ++group) {
    value = combine(value, shared[group * rows + row.place]);
  }
  return value;
}

// The largest lse of a row, or 0 where every one is -inf: what exponents are taken from.
template <class Args>
__device__ __forceinline__ float base_of(const Args& args, const Row& row, int64_t offset,
                                         float* shared) {
  float max = -infinity();
  int const groups = args.teams.groups;
  for (int first = row.group; first < args.parts; first += kBatch * groups) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      max = ptx::max_nan(max, load_lse(args, first + b * groups, offset));
    }
  }
  max = combine_groups(row, args.teams, max, shared, ptx::max_nan);
  return max == -infinity() ? 0.f : max;
}

}  // namespace flashvar::merge_states
