// The forward where tokens lie beside each other: a thread has some of a channel, and loads those
// before them again, which its neighbour has brought into the cache.
#pragma once
#include <cstdint>

#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/state.cuh"
#include "causal_conv1d/tokens.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct FwdTokensArgs : FwdProblem {
  TokenTiles tiles;  // blocks behind them write the final states
};

// kElements: of a chunk. With one, strides and the dtype of the residual may be any.
template <class Dtype, int kWidth, int kElements>
__global__ void __launch_bounds__(kThreads, 3)
    fwd_tokens_kernel(const __grid_constant__ FwdTokensArgs args) {
  constexpr int kPast = kWidth - 1;
  using Tokens = TokenPointer<Dtype, kElements>;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (blockIdx.x >= args.tiles.blocks) {
    write_final(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  TokenPlace const at(args, args.tiles);
  float taps[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) taps[j] = weight(args, at.channel, j);
  float const of_bias = bias(args, at.channel);

  at.each_chunk(args, args.tiles, kElements, [&](Span span, int64_t token) {
    float values[kPast + kElements], y[kElements], added[kElements] = {};
    Tokens(args, args.x, span.batch, at.channel).template load<kPast, 0>(token, values);
    if (args.residual.data != nullptr) {
      if constexpr (kElements > 1) {
        Tokens(args, args.residual, span.batch, at.channel).template load<0, 0>(token, added);
      } else {
        added[0] = load(args.residual, offset(args.residual, span.batch, token, at.channel));
      }
    }
    if (span.begin <= token - kPast && token + kElements <= span.end) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        y[e] = of_bias;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) y[e] = fmaf(taps[j], values[e + j], y[e]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        if (token + e >= span.end && token + e < args.seqlen) {
          span = find(args, token + e, span.index);
        }
        y[e] = of_bias;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          // Only tokens of the same sequence count, and what its state holds.
          int64_t const back = span.begin - (token + e - (kPast - j));
          float const value = back > 0 ? before(args, span, at.channel, back) : values[e + j];
          y[e] = fmaf(taps[j], value, y[e]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) y[e] = activated(y[e], args.silu) + added[e];
    Tokens(args, args.y, span.batch, at.channel).store(token, y);
  });
}

}  // namespace flashvar::causal_conv1d
