// The rows of a block, and the weights of their parts.
#pragma once
#include <cstdint>

#include "core/math.cuh"
#include "merge_states/args.h"
#include "ptx/max_nan.cuh"

namespace flashvar::merge_states {

// A part whose lse is lower than the row's highest by more than this is ignored: e^-103.97 rounds
// to 2^-149, the smallest positive fp32 number, and e^-103.98 to 0. Every backend compares with
// this number, so that none of them reads what another ignores.
inline constexpr float kLowest = -103.97f;

// exp(lse - base); may be denormal. 0 exactly for ignored parts, which include -inf whatever the
// base is.
__device__ __forceinline__ float exp_from(float lse, float base) {
  float const below = lse - base;
  return lse == -infinity() || below < kLowest ? 0.f : exp2f(below * kLog2E);
}

// A thread's coordinates: lane within a row, row within a step, group of parts.
struct ThreadCoordinate {
  int32_t lane, row, group;

  __device__ __forceinline__ explicit ThreadCoordinate(const Split& split)
      : lane(threadIdx.x & (split.lanes() - 1)),
        row(threadIdx.x >> split.lanes_log2 & (split.row_step() - 1)),
        group(threadIdx.x >> split.lanes_log2 >> (8 - split.lanes_log2 - split.groups_log2)) {}
};
static_assert(kThreads == 1 << 8);

// What a block needs of its rows, in shared memory: computed once, by a few threads per row, and
// read by all. kTensors: tensors for which row offsets are stored.
template <int kTensors>
struct Tile {
  float weights[kWindow];  // exp(lse - base) of the window's parts: [part][row]
  float base[kTileRows];   // the row's highest lse, or 0 where all are -inf
  float sum[kTileRows];    // of all weights
  float scale[kTileRows];  // 1 / sum, or 0 where all parts are ignored
  // Offsets of the row: in a part of lses, and in contiguous tensors [batch, heads, seqlen].
  int64_t lse_offset[kTileRows], lse_index[kTileRows];
  int64_t offset[kTensors][kTileRows];

  static __device__ __forceinline__ int64_t first_row(const Split& split) {
    return int64_t{blockIdx.x} * split.tile_rows;
  }

  // Calls f(row, lane, lanes) for each row, in the threads that compute its sum; warps stay
  // converged. Rows past the tile are included, for the shuffles in f.
  template <class F>
  static __device__ __forceinline__ void for_each_row(const Split& split, F f) {
    int const log2 = split.sum_lanes_log2;
    for (int first = 0; first < split.tile_rows; first += kThreads >> log2) {
      f(first + static_cast<int>(threadIdx.x >> log2),
        static_cast<int>(threadIdx.x & ((1 << log2) - 1)), 1 << log2);
    }
  }

  // Combines the values of a row's lanes, in an order that depends on nothing but their number.
  template <class Combine>
  static __device__ __forceinline__ float combine(float value, int lanes, Combine combine) {
    for (int step = 1; step < lanes; step *= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    return value;
  }

  // Whether the lanes of a row can keep the lses of all parts in registers.
  template <class Args>
  static __device__ __forceinline__ bool lanes_keep_parts(const Args& args) {
    return args.parts <= kLsesPerLane << args.split.sum_lanes_log2;
  }
  // Whether compute_rows() computes the weights too.
  template <class Args>
  static __device__ __forceinline__ bool rows_give_weights(const Args& args) {
    return lanes_keep_parts(args) && args.parts <= args.split.window();
  }

  // Computes everything but the weights, or, if rows_give_weights(), the weights as well. Rows past
  // the last repeat the last. Called by all threads.
  template <class Args>
  __device__ __forceinline__ void compute_rows(const Args& args,
                                               const RowStrides* const (&strides)[kTensors]) {
    for_each_row(args.split, [&](int row, int lane, int lanes) {
      int64_t const wanted = first_row(args.split) + min(row, args.split.tile_rows - 1);
      uint64_t const index = wanted < args.row_count ? wanted : args.row_count - 1;
      // The compiler emits a 32-bit division for indices that fit.
      uint64_t const beyond = index / args.inner;
      auto const inner = static_cast<uint32_t>(index - beyond * args.inner);
      auto const outer = static_cast<uint32_t>(beyond / args.middle);
      auto const middle = static_cast<uint32_t>(beyond - uint64_t{outer} * args.middle);
      auto offset_by = [&](const RowStrides& by) {
        return outer * by.outer + middle * by.middle + inner * by.inner;
      };
      int64_t const of_lse = offset_by(args.lses.strides);
      float max = -infinity(), total = 0.f;
      auto find_max = [&] {
        max = combine(max, lanes, [](float a, float b) { return ptx::max_nan(a, b); });
        max = max == -infinity() ? 0.f : max;
      };
      if (lanes_keep_parts(args)) {
        float found[kLsesPerLane];
#pragma unroll
        for (int i = 0; i < kLsesPerLane; ++i) {
          int const part = lane + i * lanes;
          found[i] = part < args.parts ? args.lses.part(part)[of_lse] : -infinity();
        }
#pragma unroll
        for (int i = 0; i < kLsesPerLane; ++i) max = ptx::max_nan(max, found[i]);
        find_max();
#pragma unroll
        for (int i = 0; i < kLsesPerLane; ++i) {
          int const part = lane + i * lanes;
          if (part >= args.parts) continue;
          float const weight = exp_from(found[i], max);
          total += weight;
          if (rows_give_weights(args) && row < args.split.tile_rows) {
            weights[part * args.split.tile_rows + row] = weight;
          }
        }
      } else {
        for (int part = lane; part < args.parts; part += lanes) {
          max = ptx::max_nan(max, args.lses.part(part)[of_lse]);
        }
        find_max();
        for (int part = lane; part < args.parts; part += lanes) {
          total += exp_from(args.lses.part(part)[of_lse], max);
        }
      }
      total = combine(total, lanes, [](float a, float b) { return a + b; });
      if (lane != 0 || row >= args.split.tile_rows) return;
      base[row] = max;
      sum[row] = total;
      scale[row] = total == 0.f ? 0.f : 1.f / total;
      lse_offset[row] = of_lse;
      lse_index[row] = offset_by(args.lse_strides);
#pragma unroll
      for (int i = 0; i < kTensors; ++i) offset[i][row] = offset_by(*strides[i]);
    });
    // All threads have written their rows, and their weights if rows_give_weights().
    __syncthreads();
  }

  // Fills the window with the weights of the parts from `first` on.
  template <class Args>
  __device__ __forceinline__ void compute_weights(const Args& args, int first) {
    __syncthreads();  // all threads have read the last window
    int const rows = args.split.tile_rows;
    int const count = min(args.split.window(), args.parts - first) * rows;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      int const part = i / rows, row = i - part * rows;
      weights[i] = exp_from(args.lses.part(first + part)[lse_offset[row]], base[row]);
    }
    __syncthreads();  // all weights are written
  }
};

}  // namespace flashvar::merge_states
