// The forward for tensors whose channels are contiguous. Bound by memory: a thread iterates over
// the tokens of its channels with the last kWidth - 1 tokens in registers, so that each is loaded
// once.
#pragma once
#include <cstdint>

#include "causal_conv1d/channels.cuh"
#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/state.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct FwdChannelsArgs : FwdProblem {
  ChannelTiles tiles;  // blocks after these write the final states
};

// Adds the thread's elements of a row of the residual, which start at offset `index`.
template <class Dtype, int kElements>
__device__ __forceinline__ void add_residual(const FwdProblem& problem, int64_t index,
                                             float (&y)[kElements]) {
  float added[kElements];
  if constexpr (kElements > 1) {
    Vec<Dtype, kElements> vec;
    vec.template load<true>(static_cast<const typename Dtype::Word*>(problem.residual.data) + index,
                            1);
    vec.unpack(added);
  } else {
    added[0] = load(problem.residual, index);
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) y[e] += added[e];
}

// kElements: channels per thread; with 1, strides and the residual's dtype may be any. kStages:
// rows that are prefetched. kBlocksPerSM: the registers are limited so that as many blocks fit.
template <class Dtype, int kWidth, int kElements, int kStages, int kBlocksPerSM>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    fwd_channels_kernel(const __grid_constant__ FwdChannelsArgs args) {
  constexpr int kPast = kWidth - 1;
  using Reader = RowReader<Dtype, kElements, kStages>;
  __shared__ SharedFilters<kWidth, 32 * kElements> shared;
  __shared__ typename Reader::Shared shared_rows;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  if (blockIdx.x >= args.tiles.blocks) {
    write_final(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  ChannelWork const at(args, args.tiles, kElements);
  shared.fill(args, at.first_channel);
  int64_t const channel = at.first_channel + at.lane * kElements;
  Filters<kWidth, kElements> filters;
  shared.copy(at.lane * kElements, filters);

  at.for_each_segment(args, args.tiles, channel < args.dim, [&](const Segment& segment) {
    int const rows = static_cast<int>(segment.last - segment.first);
    Reader reader(shared_rows, args.x, segment, channel);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      reader.start(stage, stage < rows);
      ptx::cp_async_commit();
    }
    float past[kPast][kElements];
    load_past<Dtype>(args, segment, channel, past);
    auto* to = first_row<Dtype>(args.y, segment, channel);
    int64_t of_residual = offset(args.residual, segment.sequence.batch, segment.first, channel);
    for (int row = 0; row < rows; row += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (row + stage >= rows) break;
        float newest[kElements], y[kElements];
        ptx::cp_async_wait<kStages - 1>();  // the row is loaded
        reader.read(stage, rows - (row + stage), newest);
        reader.start_next(stage, rows - (row + stage));
        ptx::cp_async_commit();
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          y[e] = activated(convolved<kWidth>(filters, past, newest[e], e), args.silu);
        }
        if (args.residual.data != nullptr) {
          add_residual<Dtype>(args, of_residual, y);
          of_residual += args.residual.strides[1];
        }
        Vec<Dtype, kElements> vec;
        vec.pack(y);
        vec.template store<true>(to, 1);
        to += args.y.strides[1];
        shift(past, newest);
      }
    }
  });
}

}  // namespace flashvar::causal_conv1d
