// Pass 2 of segments (segments.h): computes the states at a sequence's boundaries one after the
// other, in fp32; or their gradients, from the last one to the first, with transitions that are
// stored transposed. A block has a few columns of V of one head.
#pragma once
#include <cstdint>

#include "gated_delta_rule/segment_work.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::gated_delta_rule {

struct ScanArgs {
  FwdProblem problem;
  Segments segments;
  SegmentStates between;  // or their gradients (GradSegments::grads)
  int32_t column_tiles;   // of V
};

// Largest head dim: a block's threads hold a whole transition.
inline constexpr int kMaxScanDim = 128;

// kRows: rows of the states per thread. More take fewer accesses to shared memory; fewer make more
// threads.
template <int kDim_, int kRows_ = 2>
struct ScanConfig {
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = 8;
  static constexpr int kParts =
      kColumns;  // parts of a dot product; one thread per column adds them up
  static constexpr int kGroups = kDim / kRows;  // of rows
  static constexpr int kPart = kDim / kParts;   // terms of a part
  static constexpr int kThreads = kParts * kGroups;
};

// Rows of a column, which are loaded and stored at once.
template <int kRows>
struct alignas(4 * kRows) ScanRows {
  float at[kRows];
};

// A scan's arrays in shared memory.
template <class Config>
using ScanState = float4[Config::kColumns][Config::kDim / 4];
template <class Config>
using ScanSums = ScanRows<Config::kRows>[Config::kParts][Config::kColumns][Config::kGroups];

// Called by all threads of a block. `work`: a segment that ends at a boundary, and columns of V.
// The blocks of a sequence's first boundary compute all of its boundaries; the others return.
// `reverse`: computes the gradients, from a sequence's last boundary to its first.
template <class Config>
__device__ __forceinline__ void scan_boundaries(const ScanArgs& args, const SegmentWork& work,
                                                bool reverse, ScanState<Config>& state,
                                                ScanSums<Config>& sums) {
  constexpr int kDim = Config::kDim, kColumns = Config::kColumns, kPart = Config::kPart;
  constexpr int kRows = Config::kRows, kGroups = Config::kGroups;
  using Rows = ScanRows<kRows>;
  const FwdProblem& problem = args.problem;
  if (!work.exists || work.before >= 0) return;
  // Boundaries of the sequence. The state at the first one is known: pass 1 has stored it. So is
  // the gradient at the last one.
  int32_t const boundaries = (problem.rows.span(work.sequence).count - 1) / args.segments.rows;
  if (boundaries == 1) return;

  int const group = static_cast<int>(threadIdx.x) % kGroups;
  int const part = static_cast<int>(threadIdx.x) / kGroups;
  int32_t const known = reverse ? work.after + boundaries - 1 : work.after;
  auto const address_of = [&](const State& array, int column, int row) {
    return array.data + known * array.sequence_stride + work.head * array.head_stride +
           column * array.v_stride + row;
  };
  const State& states = args.between.states;
  const State& transitions = args.between.transitions;
  int64_t const step = reverse ? -1 : 1;  // to the next boundary
  // The thread has some rows of a transition, columns from part * kPart on. Stored transposed, it
  // has no rows beyond K.
  bool const has_rows = !reverse || kRows * group < problem.head_dim;
  const float* transition = address_of(transitions, part * kPart, kRows * group);
  Rows m[kPart];
  auto const load_transition = [&](int i) {
#pragma unroll
    for (int term = i; term < i + 4; ++term) {
      bool const exists = part * kPart + term < problem.head_dim && has_rows;
      m[term] = exists ? *reinterpret_cast<const Rows*>(transition + term * kDim) : Rows{};
    }
  };
  // The transition from the boundary that is known: of the segment after it, or of that before it.
  if (!reverse) transition += transitions.sequence_stride;
#pragma unroll
  for (int i = 0; i < kPart; i += 4) load_transition(i);
  // When the parts are added up, the thread has its rows of this column of the state.
  int32_t const column = work.column + part;
  bool const exists = column < problem.head_dim_v;
  float* to = address_of(states, column, kRows * group);
  Rows& in_shared = reinterpret_cast<Rows*>(state[part])[group];
  in_shared = exists ? *reinterpret_cast<const Rows*>(to) : Rows{};
  for (int32_t boundary = 1; boundary < boundaries; ++boundary) {
    to += step * states.sequence_stride;
    transition += step * transitions.sequence_stride;
    Rows own = exists ? *reinterpret_cast<const Rows*>(to) : Rows{};  // Z
    __syncthreads();  // all of the first state is in shared memory
    Rows sum[kColumns] = {};
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float4 const s = state[j][(part * kPart + i) / 4];
        float const terms[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int term = 0; term < 4; ++term) {
#pragma unroll
          for (int row = 0; row < kRows; ++row) {
            sum[j].at[row] = fmaf(m[i + term].at[row], terms[term], sum[j].at[row]);
          }
        }
      }
      if (boundary + 1 < boundaries) load_transition(i);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[part][j][group] = sum[j];
    __syncthreads();  // all parts are written, and the state has been read
#pragma unroll
    for (int i = 0; i < Config::kParts; ++i) {
      Rows const one = sums[i][part][group];
#pragma unroll
      for (int row = 0; row < kRows; ++row) own.at[row] += one.at[row];
    }
    in_shared = own;
    if (exists) *reinterpret_cast<Rows*>(to) = own;
  }
}

// Grid: boundaries x heads x column tiles of V.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    scan_kernel(const __grid_constant__ ScanArgs args) {
  __shared__ ScanState<Config> state;
  __shared__ ScanSums<Config> sums;
  // Pass 1 is complete. Blocks without work wait, too: see griddepcontrol_wait().
  ptx::griddepcontrol_wait();
  auto const work = SegmentWork::ending_at_boundary(args.problem, args.segments, args.column_tiles,
                                                    Config::kColumns);
  scan_boundaries<Config>(args, work, false, state, sums);
}

}  // namespace flashvar::gated_delta_rule
