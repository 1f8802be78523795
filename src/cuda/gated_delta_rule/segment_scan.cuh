// Pass 2 of segments (segments.h): computes the states at a sequence's boundaries one after the
// other, in fp32. A block has a few columns of V of one head.
#pragma once
#include <cstdint>

#include "gated_delta_rule/segment_work.cuh"
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
  static constexpr int kParts =
      kColumns;  // parts of a dot product; one thread per column adds them up
  static constexpr int kPairs = kDim / 2;      // of rows
  static constexpr int kPart = kDim / kParts;  // terms of a part
  static constexpr int kThreads = kParts * kPairs;
};

// Grid: boundaries x heads x column tiles of V. The blocks of a sequence's first boundary compute
// all of its boundaries; the others exit.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    scan_kernel(const __grid_constant__ ScanArgs args) {
  constexpr int kDim = Config::kDim, kColumns = Config::kColumns, kPart = Config::kPart;
  constexpr int kPairs = Config::kPairs;
  __shared__ float4 state[kColumns][kDim / 4];
  __shared__ float2 sums[Config::kParts][kColumns][kPairs];
  // Also in blocks without work: the next grid waits for this grid only, so this one must not be
  // complete before the preceding one is.
  ptx::griddepcontrol_wait();  // pass 1 is complete
  const FwdProblem& problem = args.problem;
  auto const work =
      SegmentWork::before_boundary(problem, args.segments, args.column_tiles, kColumns);
  if (!work.exists || work.before >= 0) return;
  // Boundaries of the sequence. The state at the first one is known: pass 1 has stored it.
  int32_t const boundaries = (problem.rows.span(work.sequence).count - 1) / args.segments.rows;
  if (boundaries == 1) return;

  int const pair = static_cast<int>(threadIdx.x) % kPairs;
  int const part = static_cast<int>(threadIdx.x) / kPairs;
  auto const place = [&](const State& of, int column) {
    return of.data + work.after * of.sequence_stride + work.head * of.head_stride +
           column * of.v_stride + 2 * pair;
  };
  const State& states = args.between.states;
  const State& transitions = args.between.transitions;
  // The thread has two rows of a transition, columns from part * kPart on.
  const float* transition = place(transitions, part * kPart);
  float2 m[kPart];
  auto const load_transition = [&](int i) {
    bool const exists = part * kPart + i < problem.head_dim;
    m[i] = exists ? *reinterpret_cast<const float2*>(transition + i * kDim) : float2{};
  };
  transition += transitions.sequence_stride;
#pragma unroll
  for (int i = 0; i < kPart; ++i) load_transition(i);
  // When the parts are added up, the thread has two elements of this column of the state.
  int32_t const column = work.column + part;
  bool const exists = column < problem.head_dim_v;
  float* to = place(states, column);
  float2& in_shared = reinterpret_cast<float2*>(state[part])[pair];
  in_shared = exists ? *reinterpret_cast<const float2*>(to) : float2{};
  for (int32_t boundary = 1; boundary < boundaries; ++boundary) {
    to += states.sequence_stride;
    transition += transitions.sequence_stride;
    float2 own = exists ? *reinterpret_cast<const float2*>(to) : float2{};  // b
    __syncthreads();  // all of the first state is in shared memory
    float2 sum[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float4 const s = state[j][(part * kPart + i) / 4];
        float const terms[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int term = 0; term < 4; ++term) {
          sum[j].x = fmaf(m[i + term].x, terms[term], sum[j].x);
          sum[j].y = fmaf(m[i + term].y, terms[term], sum[j].y);
        }
      }
      if (boundary + 1 < boundaries) {
#pragma unroll
        for (int term = 0; term < 4; ++term) load_transition(i + term);
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[part][j][pair] = sum[j];
    __syncthreads();  // all parts are written, and the state has been read
#pragma unroll
    for (int i = 0; i < Config::kParts; ++i) {
      float2 const one = sums[i][part][pair];
      own.x += one.x;
      own.y += one.y;
    }
    in_shared = own;
    if (exists) *reinterpret_cast<float2*>(to) = own;
  }
}

}  // namespace flashvar::gated_delta_rule
