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

// kElements: of a thread. With one, strides and the dtype of the residual may be any.
template <class Dtype, int kWidth, int kElements>
__global__ void __launch_bounds__(kThreads, 2)
    fwd_channels_kernel(const __grid_constant__ FwdChannelsArgs args) {
  constexpr int kPast = kWidth - 1;
  constexpr int kRows = kElements == 1 ? 8 : 4;  // in flight
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
    Rows const from(args.x, segment, channel), to(args.y, segment, channel);
    Rows const beside(args.residual, segment, channel);
    bool const has_residual = args.residual.data != nullptr;
    for (int row = 0; row < rows; row += kRows) {
      Chunk<Dtype, kElements> chunks[kRows], residuals[kRows];
      from.load(chunks, row, rows);
      if (kElements > 1 && has_residual) beside.load(residuals, row, rows);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (row + u >= rows) break;
        float newest[kElements], y[kElements], added[kElements];
        chunks[u].unpack(newest);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          y[e] = activated(convolved<kWidth>(filters, past, newest[e], e), args.silu);
        }
        if (has_residual) {
          if constexpr (kElements > 1) {
            residuals[u].unpack(added);
          } else {
            added[0] = load(args.residual, offset(args.residual, segment.span.batch,
                                                  segment.first + row + u, channel));
          }
#pragma unroll
          for (int e = 0; e < kElements; ++e) y[e] += added[e];
        }
        to.store(y, row + u);
        shift(past, newest);
      }
    }
  });
}

}  // namespace flashvar::causal_conv1d
