// The backward for tensors whose channels are contiguous. As in the forward a thread iterates over
// tokens. The gradients of the last kWidth - 1 tokens, to which later ones still add, stay in
// registers; the thread continues past its last row until they are complete.
#pragma once
#include <cstdint>
#include <type_traits>

#include "causal_conv1d/channels.cuh"
#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/state.cuh"
#include "causal_conv1d/sums.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/pin.cuh"

namespace flashvar::causal_conv1d {

struct BwdChannelsArgs : BwdProblem {
  ChannelTiles tiles;  // blocks after these write the gradients of states
};

// Adds the final state's gradient to that of the row that is `left` rows before its sequence's end.
template <int kElements>
__device__ __forceinline__ void add_grad_final(const BwdProblem& problem, const Sequence& sequence,
                                               int64_t channel, int64_t left,
                                               float (&grads)[kElements]) {
  for (int e = 0; e < kElements; ++e) {
    grads[e] += load(problem.grad_final, offset(problem.grad_final, sequence.index, channel + e,
                                                problem.final_columns - left));
  }
}

// Adds up the sums of a block's groups, in order, and stores them: as gradients, or as the block's
// part. `shared`: kFloats, which threads may still read.
template <int kWidth, int kElements>
struct BlockSums {
  static constexpr int kPitch = kThreads + 8;  // apart in banks for the channels of a thread
  static constexpr int kFloats = (kWidth + 1) * kElements * kPitch;

  static __device__ __forceinline__ void store(const BwdChannelsArgs& args,
                                               const float (&sums)[kWidth + 1][kElements],
                                               float* shared) {
    __syncthreads();  // all threads have read `shared`, which is overwritten
#pragma unroll
    for (int j = 0; j <= kWidth; ++j) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        shared[(j * kElements + e) * kPitch + threadIdx.x] = sums[j][e];
      }
    }
    __syncthreads();  // all threads have written their sums
    // Computed again: in the loop over rows there are no registers for it.
    ChannelWork const at(args, args.tiles, kElements, ptx::pin(blockIdx.x));
    int const lanes = 1 << args.tiles.lanes_log2, channels = lanes * kElements;
    for (int i = threadIdx.x; i < (kWidth + 1) * channels; i += kThreads) {
      int const j = i >> args.tiles.lanes_log2, tap = j / kElements;
      int const of_block = i - tap * channels;
      int64_t const channel = at.first_channel + of_block;
      if (channel >= args.dim) continue;
      const float* const from =
          shared + (tap * kElements + of_block % kElements) * kPitch + of_block / kElements;
      float sum = from[0];
      for (int other = lanes; other < kThreads; other += lanes) sum += from[other];
      if (args.tiles.is_whole()) {
        store_sum<kWidth>(args.grad_weight, args.grad_bias, channel, tap, sum);
      } else {
        args.parts[(at.row_block * (kWidth + 1) + tap) * args.dim + channel] = sum;
      }
    }
  }
};

// kElements: channels per thread; with 1, strides may be any. kStages: rows that are prefetched.
// kLanes: most lanes of a group. Over 100 lines, because the step is a closure over the registers
// that a thread keeps from row to row.
template <class Dtype, int kWidth, int kElements, int kStages, int kLanes, int kBlocksPerSM>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    bwd_channels_kernel(const __grid_constant__ BwdChannelsArgs args) {
  constexpr int kPast = kWidth - 1;
  using Reader = RowReader<Dtype, kElements, kStages>;
  using Sums = BlockSums<kWidth, kElements>;
  __shared__ union {
    typename Reader::Shared rows[2];
    float sums[Sums::kFloats];
  } shared;
  __shared__ SharedFilters<kWidth, kLanes * kElements> shared_filters;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  if (blockIdx.x >= args.tiles.blocks) {
    write_grad_state(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  ChannelWork const at(args, args.tiles, kElements);
  int64_t const channel = at.first_channel + at.lane * kElements;
  // Copies of rows to shared memory start only after the filters are loaded; until then the rows
  // are prefetched into L2, by one thread for each sector of 32 bytes.
  constexpr int kEach = 32 / (kElements * sizeof(typename Dtype::Word));
  if (kElements > 1 && at.lane % kEach == 0 && channel < args.dim) {
    at.prefetch<Dtype, kStages>(args, channel);
  }
  shared_filters.fill(args, at.first_channel);
  Filters<kWidth, kElements> filters;
  shared_filters.copy(at.lane * kElements, filters);
  float sums[kWidth + 1][kElements] = {};  // of the weights' gradients, and of the bias's

  at.for_each_segment(args, args.tiles, channel < args.dim, [&](const Segment& segment) {
    // Counted from the segment's first row: `left` rows of the sequence, `rows` of the thread,
    // `ahead` that it reads, and the first row that is part of the final state.
    int64_t const left = segment.sequence.end - segment.first;
    int const rows = static_cast<int>(segment.last - segment.first);
    int const ahead = static_cast<int>(min(left, int64_t{rows} + kPast));
    bool const has_final = args.grad_final.data != nullptr;
    int const first_kept = has_final && left - args.final_columns < rows
                               ? static_cast<int>(max(left - args.final_columns, int64_t{0}))
                               : rows;
    Reader from(shared.rows[0], args.x, segment, channel);
    Reader grads(shared.rows[1], args.grad_y, segment, channel);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      from.start(stage, stage < ahead);
      grads.start(stage, stage < ahead);
      ptx::cp_async_commit();
    }
    float past[kPast][kElements];
    load_past<Dtype>(args, segment, channel, past);
    auto* to = first_row<Dtype>(args.grad_x, segment, channel);
    auto write = [&](const float (&grad)[kElements]) {
      Vec<Dtype, kElements> vec;
      vec.pack(grad);
      vec.template store<true>(to, 1);
      to += args.grad_x.strides[1];
    };
    auto finish = [&](float (&grad)[kElements], int row) {
      if (row >= first_kept) add_grad_final(args, segment.sequence, channel, left - row, grad);
      write(grad);
    };
    float pending[kPast][kElements] = {};  // gradients of the last rows
    // Processes a row. kInner: the row is the thread's, and the row whose gradient it completes is
    // not part of a final state.
    auto step = [&](auto inner, bool silu, int stage, int row) {
      constexpr bool kInner = decltype(inner)::value;
      float newest[kElements], grad[kElements], done[kElements];
      ptx::cp_async_wait<kStages - 1>();  // the rows are loaded
      from.read(stage, ahead - row, newest);
      grads.read(stage, ahead - row, grad);
      from.start_next(stage, ahead - row);
      grads.start_next(stage, ahead - row);
      ptx::cp_async_commit();
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        grad[e] = grad_activated(grad[e], convolved<kWidth>(filters, past, newest[e], e), silu);
      }
      if (kInner || row < rows) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
#pragma unroll
          for (int j = 0; j < kPast; ++j) sums[j][e] = fmaf(grad[e], past[j][e], sums[j][e]);
          sums[kPast][e] = fmaf(grad[e], newest[e], sums[kPast][e]);
          sums[kWidth][e] += grad[e];
        }
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        done[e] = fmaf(filters.taps[0][e], grad[e], pending[0][e]);
#pragma unroll
        for (int k = 0; k + 1 < kPast; ++k) {
          pending[k][e] = fmaf(filters.taps[k + 1][e], grad[e], pending[k + 1][e]);
        }
        pending[kPast - 1][e] = filters.taps[kPast][e] * grad[e];
      }
      if constexpr (kInner) {
        write(done);
      } else if (row >= kPast) {
        finish(done, row - kPast);
      }
      shift(past, newest);
    };
    for (int row = 0; row < ahead; row += kStages) {
      bool const inner = row >= kPast && row + kStages <= min(rows, first_kept + kPast);
      if (inner && args.silu) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
          step(std::true_type(), true, stage, row + stage);
        }
      } else {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
          if (row + stage < ahead) step(std::false_type(), args.silu, stage, row + stage);
        }
      }
    }
    // At the sequence's end the pending gradients are complete.
#pragma unroll
    for (int k = 0; k < kPast; ++k) {
      int const row = ahead - kPast + k;
      if (0 <= row && row < rows) finish(pending[k], row);
    }
  });

  Sums::store(args, sums, shared.sums);
}

}  // namespace flashvar::causal_conv1d
