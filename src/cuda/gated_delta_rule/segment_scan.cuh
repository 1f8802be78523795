// Pass 2 of segments (segments.h): the states at a sequence's boundaries, one after the other, in
// fp32. A block has a few columns of V of one head.
#pragma once
#include <cstdint>

#include "gated_delta_rule/chain.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::gated_delta_rule {

struct ScanArgs {
  FwdProblem problem;
  Segments segments;
  SegmentStates between;
  int32_t column_tiles;  // of V
};

template <int kDim_>
struct ScanConfig {
  static constexpr int kDim = kDim_;
  static constexpr int kColumns = 8;
  static constexpr int kParts = 4;  // of a sum
  static constexpr int kThreads = kParts * kDim;
  static constexpr int kPart = kDim / kParts;  // terms of a part
};

// The grid: boundaries times heads times tiles of columns of V. A sequence's first boundary does
// all of it.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    scan_kernel(const __grid_constant__ ScanArgs args) {
  constexpr int kDim = Config::kDim, kColumns = Config::kColumns, kPart = Config::kPart;
  __shared__ float4 state[kColumns][kDim / 4];
  __shared__ float sums[Config::kParts][kColumns][kDim];
  // Also where there is nothing to do: the next grid waits for this one only.
  ptx::griddepcontrol_wait();
  const FwdProblem& problem = args.problem;
  auto const work =
      SegmentWork::before_boundary(problem, args.segments, args.column_tiles, kColumns);
  if (!work.exists || work.after < 0 || work.before >= 0) return;
  int const k = static_cast<int>(threadIdx.x) % kDim, part = static_cast<int>(threadIdx.x) / kDim;
  int32_t const dim = problem.head_dim;
  auto const place = [&](const State& of) {
    return of.data + work.after * of.sequence_stride + work.head * of.head_stride + k;
  };
  const State& states = args.between.states;
  const State& transitions = args.between.transitions;
  float* to = place(states) + work.column * states.v_stride;
  const float* transition = place(transitions) + part * kPart * transitions.v_stride;

  // A thread has row k of a transition, columns from part * kPart on.
  float m[kPart];
  auto const load_transition = [&] {
    transition += transitions.sequence_stride;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      bool const exists = k < dim && part * kPart + i < dim;
      m[i] = exists ? transition[i * transitions.v_stride] : 0.f;
    }
  };
  // And after the parts are added, these columns of the state.
  constexpr int kOwn = kColumns / Config::kParts;
  auto const exists = [&](int column) {
    return k < dim && work.column + column < problem.head_dim_v;
  };
  float* const in_shared = reinterpret_cast<float*>(state) + k;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const column = part * kOwn + i;
    in_shared[column * kDim] = exists(column) ? to[column * states.v_stride] : 0.f;
  }
  int32_t const boundaries = (problem.rows.span(work.sequence).count - 1) / args.segments.rows;
  if (boundaries > 1) load_transition();
  for (int32_t boundary = 1; boundary < boundaries; ++boundary) {
    to += states.sequence_stride;
    float own[kOwn];  // b
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      int const column = part * kOwn + i;
      own[i] = exists(column) ? to[column * states.v_stride] : 0.f;
    }
    __syncthreads();  // the state is there
    float sum[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        float4 const s = state[column][(part * kPart + i) / 4];
        sum[column] = fmaf(m[i], s.x, sum[column]);
        sum[column] = fmaf(m[i + 1], s.y, sum[column]);
        sum[column] = fmaf(m[i + 2], s.z, sum[column]);
        sum[column] = fmaf(m[i + 3], s.w, sum[column]);
      }
    }
    if (boundary + 1 < boundaries) load_transition();
#pragma unroll
    for (int column = 0; column < kColumns; ++column) sums[part][column][k] = sum[column];
    __syncthreads();  // the parts are there, and the state has been read
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      int const column = part * kOwn + i;
#pragma unroll
      for (int of = 0; of < Config::kParts; ++of) own[i] += sums[of][column][k];
      in_shared[column * kDim] = own[i];
      if (exists(column)) to[column * states.v_stride] = own[i];
    }
  }
}

}  // namespace flashvar::gated_delta_rule
