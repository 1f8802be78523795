// The backward where tokens lie beside each other. The gradient of a token is of the next kWidth -
// 1 too, and these are of those before them: a thread loads both again, and what comes before
// activations is found once more for the next.
#pragma once
#include <cstdint>

#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/state.cuh"
#include "causal_conv1d/tokens.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct BwdTokensArgs : BwdProblem {
  TokenTiles tiles;  // blocks behind them write the gradients of states
};

// kElements: of a chunk. With one, strides may be any.
template <class Dtype, int kWidth, int kElements>
__global__ void __launch_bounds__(kThreads, kElements > 1 ? 2 : 3)
    bwd_tokens_kernel(const __grid_constant__ BwdTokensArgs args) {
  constexpr int kPast = kWidth - 1;
  constexpr int kGrads = kElements + kPast;
  using Tokens = TokenPointer<Dtype, kElements>;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (blockIdx.x >= args.tiles.blocks) {
    write_grad_state(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  TokenPlace const at(args, args.tiles);
  float taps[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) taps[j] = weight(args, at.channel, j);
  float const of_bias = bias(args, at.channel);
  int64_t const final_columns = args.grad_final.data == nullptr ? 0 : args.final_columns;
  float sums[kWidth + 1] = {};  // of the weights' gradients, and of the bias's

  at.each_chunk(args, args.tiles, kElements, [&](Span span, int64_t token) {
    float values[kPast + kGrads], grads[kGrads], results[kElements] = {};
    Tokens(args, args.x, span.batch, at.channel).template load<kPast, kPast>(token, values);
    Tokens(args, args.grad_y, span.batch, at.channel).template load<0, kPast>(token, grads);
    if (span.begin <= token - kPast &&
        token + kElements + max(int64_t{kPast}, final_columns) <= span.end) {
#pragma unroll
      for (int e = 0; e < kGrads; ++e) {
        float z = of_bias;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) z = fmaf(taps[j], values[e + j], z);
        grads[e] = grad_activated(grads[e], z, args.silu);
        if (e >= kElements) continue;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j] = fmaf(grads[e], values[e + j], sums[j]);
        sums[kWidth] += grads[e];
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          results[e] = fmaf(taps[kPast - i], grads[e + i], results[e]);
        }
      }
    } else {
      int begins[kGrads];  // where the token's sequence begins: a place among them, or below 0
#pragma unroll
      for (int e = 0; e < kGrads; ++e) {
        bool const exists = token + e < args.seqlen;
        if (exists && token + e >= span.end) span = find(args, token + e, span.index);
        begins[e] = static_cast<int>(max(span.begin - token, int64_t{-1}));
        float z = of_bias, inputs[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          // Only tokens of the same sequence count, and what its state holds.
          int64_t const back = span.begin - (token + e - (kPast - j));
          inputs[j] = back > 0 ? before(args, span, at.channel, back) : values[e + j];
          z = fmaf(taps[j], inputs[j], z);
        }
        grads[e] = grad_activated(grads[e], z, args.silu);
        if (e >= kElements || !exists) continue;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j] = fmaf(grads[e], inputs[j], sums[j]);
        sums[kWidth] += grads[e];
        int64_t const column = token + e - span.end + final_columns;
        if (column >= 0 && final_columns > 0) {
          results[e] =
              load(args.grad_final, offset(args.grad_final, span.index, at.channel, column));
        }
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        float result = 0.f;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          // Weights may be infinite: they count for nothing where no token of the sequence is.
          bool const follows = token + e + i < args.seqlen && begins[e + i] <= e;
          if (follows) result = fmaf(taps[kPast - i], grads[e + i], result);
        }
        results[e] += result;
      }
    }
    Tokens(args, args.grad_x, span.batch, at.channel).store(token, results);
  });

  // The lanes of a channel add up, in an order that depends on nothing but their number.
#pragma unroll
  for (int j = 0; j <= kWidth; ++j) {
    for (int step = 1; step < 1 << args.tiles.lanes_log2; step *= 2) {
      sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], step);
    }
    if (at.lane != 0 || at.chunk >= args.tiles.chunks) continue;
    args.parts[(at.chunk * (kWidth + 1) + j) * args.dim + at.channel] = sums[j];
  }
}

}  // namespace flashvar::causal_conv1d
