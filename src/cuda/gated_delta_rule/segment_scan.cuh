// Pass 2 of segments (segments.h): computes the states at a sequence's boundaries one after the
// other, in fp32; or their gradients, from the last one to the first, with the transitions
// transposed. A block has a few columns of V of one head.
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

// kReverse: gradients.
template <int kDim_, bool kReverse_ = false>
struct ScanConfig {
  static constexpr int kDim = kDim_;
  static constexpr bool kReverse = kReverse_;
  static constexpr int kColumns = 8;
  static constexpr int kParts =
      kColumns;  // parts of a dot product; one thread per column adds them up
  static constexpr int kPairs = kDim / 2;      // of rows
  static constexpr int kPart = kDim / kParts;  // terms of a part
  static constexpr int kThreads = kParts * kPairs;
};

// A scan's arrays in shared memory.
template <class Config>
using ScanState = float4[Config::kColumns][Config::kDim / 4];
template <class Config>
using ScanSums = float2[Config::kParts][Config::kColumns][Config::kPairs];

// Called by all threads of a block. `work`: a segment that ends at a boundary, and columns of V.
// The blocks of a sequence's first boundary compute all of its boundaries; the others return.
template <class Config>
__device__ __forceinline__ void scan_boundaries(const ScanArgs& args, const SegmentWork& work,
                                                ScanState<Config>& state, ScanSums<Config>& sums) {
  constexpr int kDim = Config::kDim, kColumns = Config::kColumns, kPart = Config::kPart;
  constexpr int kPairs = Config::kPairs;
  constexpr bool kReverse = Config::kReverse;
  const FwdProblem& problem = args.problem;
  if (!work.exists || work.before >= 0) return;
  // Boundaries of the sequence. The state at the first one is known: pass 1 has stored it. So is
  // the gradient at the last one.
  int32_t const boundaries = (problem.rows.span(work.sequence).count - 1) / args.segments.rows;
  if (boundaries == 1) return;

  int const pair = static_cast<int>(threadIdx.x) % kPairs;
  int const part = static_cast<int>(threadIdx.x) / kPairs;
  int32_t const known = kReverse ? work.after + boundaries - 1 : work.after;
  auto const place = [&](const State& of, int column, int row) {
    return of.data + known * of.sequence_stride + work.head * of.head_stride +
           column * of.v_stride + row;
  };
  const State& states = args.between.states;
  const State& transitions = args.between.transitions;
  // The thread has two rows of a transition, columns from part * kPart on; or two columns, rows
  // from there on.
  const float* transition = kReverse ? place(transitions, 2 * pair, part * kPart)
                                     : place(transitions, part * kPart, 2 * pair);
  float2 m[kPart];
  auto const load_transition = [&](int i) {
    if constexpr (kReverse) {
      bool const exists = 2 * pair < problem.head_dim;
      float4 columns[2] = {};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (exists) columns[j] = *reinterpret_cast<const float4*>(transition + j * kDim + i);
      }
      m[i] = {columns[0].x, columns[1].x};
      m[i + 1] = {columns[0].y, columns[1].y};
      m[i + 2] = {columns[0].z, columns[1].z};
      m[i + 3] = {columns[0].w, columns[1].w};
    } else {
#pragma unroll
      for (int term = i; term < i + 4; ++term) {
        bool const exists = part * kPart + term < problem.head_dim;
        m[term] = exists ? *reinterpret_cast<const float2*>(transition + term * kDim) : float2{};
      }
    }
  };
  // The transition from the boundary that is known: of the segment after it, or of that before it.
  if constexpr (!kReverse) transition += transitions.sequence_stride;
#pragma unroll
  for (int i = 0; i < kPart; i += 4) load_transition(i);
  // When the parts are added up, the thread has two elements of this column of the state.
  int32_t const column = work.column + part;
  bool const exists = column < problem.head_dim_v;
  float* to = place(states, column, 2 * pair);
  float2& in_shared = reinterpret_cast<float2*>(state[part])[pair];
  in_shared = exists ? *reinterpret_cast<const float2*>(to) : float2{};
  for (int32_t boundary = 1; boundary < boundaries; ++boundary) {
    to += kReverse ? -states.sequence_stride : states.sequence_stride;
    transition += kReverse ? -transitions.sequence_stride : transitions.sequence_stride;
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
      if (boundary + 1 < boundaries) load_transition(i);
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

// Grid: boundaries x heads x column tiles of V.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    scan_kernel(const __grid_constant__ ScanArgs args) {
  __shared__ ScanState<Config> state;
  __shared__ ScanSums<Config> sums;
  // Also in blocks without work: the next grid waits for this grid only, so this one must not be
  // complete before the preceding one is.
  ptx::griddepcontrol_wait();  // pass 1 is complete
  auto const work = SegmentWork::before_boundary(args.problem, args.segments, args.column_tiles,
                                                 Config::kColumns);
  scan_boundaries<Config>(args, work, state, sums);
}

}  // namespace flashvar::gated_delta_rule
