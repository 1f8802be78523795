// The forward where channels lie beside each other. Bound by memory: a thread goes along the tokens
// of its channels with the last kWidth - 1 of them in registers, so that each is loaded once.
#pragma once
#include <cstdint>

#include "causal_conv1d/channels.cuh"
#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/state.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct FwdChannelsArgs : FwdProblem {
  ChannelTiles tiles;  // blocks behind them write the final states
};

// kElements: of a thread, kRows: in flight. With one element, strides and the dtype of the residual
// may be any.
template <class Dtype, int kWidth, int kElements, int kRows>
__global__ void __launch_bounds__(kThreads, 2)
    fwd_channels_kernel(const __grid_constant__ FwdChannelsArgs args) {
  constexpr int kPast = kWidth - 1;
  using Rows = RowPointer<Dtype, kElements>;
  __shared__ SharedFilters<kWidth, 32 * kElements> shared;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (blockIdx.x >= args.tiles.blocks) {
    write_final(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  ChannelPlace const at(args, args.tiles, kElements);
  shared.fill(args, at.first_channel);
  int64_t const channel = at.first_channel + at.lane * kElements;
  Filters<kWidth, kElements> filters;
  shared.copy(at.lane * kElements, filters);

  at.each_segment(args, args.tiles, channel < args.dim, [&](const Segment& segment) {
    float past[kPast][kElements];
    load_past(args, segment, channel, past);
    int const rows = static_cast<int>(segment.last - segment.first);
    Rows from(args.x, segment, channel), to(args.y, segment, channel);
    Rows beside(args.residual, segment, channel);
    for (int row = 0; row < rows; row += kRows) {
      Chunk<Dtype, kElements> chunks[kRows];
      from.load(chunks, rows - row);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (row + u >= rows) break;
        float newest[kElements], y[kElements];
        chunks[u].unpack(newest);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          y[e] = activated(convolved<kWidth>(filters, past, newest[e], e), args.silu);
        }
        if (args.residual.data != nullptr) {
          float added[kElements];
          if constexpr (kElements > 1) {
            Chunk<Dtype, kElements> chunk[1];
            beside.load(chunk, 1);
            chunk[0].unpack(added);
          } else {
            added[0] = load(args.residual, offset(args.residual, segment.span.batch,
                                                  segment.first + row + u, channel));
          }
#pragma unroll
          for (int e = 0; e < kElements; ++e) y[e] += added[e];
        }
        to.store(y);
        shift(past, newest);
      }
    }
  });
}

}  // namespace flashvar::causal_conv1d
