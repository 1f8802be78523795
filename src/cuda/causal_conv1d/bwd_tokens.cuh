// The backward where tokens lie beside each other. A thread has some of a channel in each tile. The
// tokens before its own come from other lanes, and so do the gradients behind them, which the tiles
// behind have found: a block goes from its last tile to its first.
#pragma once
#include <cstdint>
#include <type_traits>

#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/state.cuh"
#include "causal_conv1d/tokens.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct BwdTokensArgs : BwdProblem {
  TokenTiles tiles;  // blocks behind them write the gradients of states
};

// The gradients of activations' inputs of the first tokens behind a block's last tile.
template <int kPast, int kElements, class Marks>
__device__ __forceinline__ void find_behind(const BwdProblem& problem, const Marks& beginnings,
                                            const TokenPlace& at, int64_t batch, int64_t end,
                                            float (&behind)[kElements == 1 ? 1 : kPast]) {
  int64_t const token = end + at.lane;
  float grad = 0.f;
  if (at.exists() && at.lane < kPast && token < problem.seqlen) {
    Span const span = beginnings.span(problem, batch, token);
    grad = grad_convolved(problem, span, at.channel, token - span.begin);
  }
  if constexpr (kElements == 1) {
    behind[0] = grad;
  } else {
#pragma unroll
    for (int i = 0; i < kPast; ++i) behind[i] = __shfl_sync(0xffffffffu, grad, i, at.lanes);
  }
}

// kElements: of a thread in a tile, kStages: tiles that are read ahead, kTiles: of a chunk, at
// most. With one element, strides may be any.
template <class Dtype, int kWidth, int kElements, int kStages, int kTiles>
__global__ void __launch_bounds__(kThreads, 2)
    bwd_tokens_kernel(const __grid_constant__ BwdTokensArgs args) {
  constexpr int kPast = kWidth - 1;
  using C = Chunk<Dtype, kElements>;
  using Cursor = TileCursor<Dtype, kElements>;
  using Marks = Beginnings<kPast, kElements, kPast, kTiles>;
  __shared__ typename Marks::Shared shared;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (blockIdx.x >= args.tiles.blocks) {
    write_grad_state(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  TokenPlace const at(args, args.tiles, kElements);
  int const last = at.count - 1;
  Cursor from(args.x, args.tiles, at, last), of_y(args.grad_y, args.tiles, at, last);
  Cursor to(args.grad_x, args.tiles, at, last);
  C chunks[kStages], grad_chunks[kStages];
  bool const sees_next = at.tile > 0 && at.sees_next<kPast, kElements>();
  auto load = [&](int stage, int number) {
    bool const exists = number < at.count && from.tile < at.own_tiles;
    chunks[stage].template load<true>(from.data(), exists || (number == at.count && sees_next));
    grad_chunks[stage].template load<true>(of_y.data(), exists);
    from.retreat();
    of_y.retreat();
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) load(stage, stage);
  ChannelFilter<kWidth> const filter(args, at.channel, at.exists());
  Marks const beginnings(shared, args, args.tiles, at);
  float behind[kElements == 1 ? 1 : kPast];
  find_behind<kPast, kElements>(args, beginnings, at, to.batch(),
                                (int64_t{to.tile} + 1) * at.lanes * kElements, behind);
  float sums[kWidth + 1] = {};  // of the weights' gradients, and of the bias's
  auto add = [&](float grad, const float* past, float newest) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) sums[j] = fmaf(grad, past[j], sums[j]);
    sums[kPast] = fmaf(grad, newest, sums[kPast]);
    sums[kWidth] += grad;
  };

  for (int first = 0; first < at.count; first += kStages) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      int const number = first + stage;
      if (number >= at.count) break;
      // Values before a thread's own, and its own; its gradients, and those behind.
      float values[kPast + kElements], grads[kElements], next[kPast], results[kElements];
      take_before<kPast>(chunks[stage], chunks[(stage + 1) % kStages], at, values);
      unpack_behind<kPast>(chunks[stage], values);
      grad_chunks[stage].unpack(grads);
      load(stage, number + kStages);
      bool const exists = to.tile < at.own_tiles;
      int64_t const token = at.token(to.tile, kElements);
      uint32_t const marks = exists ? beginnings(last - number, at) : 0;
      bool const inner = !__any_sync(0xffffffffu, marks);
      if (inner && args.silu) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          grads[e] =
              grad_activated(grads[e], filter.convolved(values + e, values[kPast + e]), true);
          add(grads[e], values + e, values[kPast + e]);
        }
      } else {
        auto walk = [&](auto silu) {
          each_token<kPast, kElements>(
              args, beginnings, marks, to.batch(), token, at.channel, values,
              [&](int e, const float (&past)[kPast], float newest) {
                grads[e] =
                    grad_activated(grads[e], filter.convolved(past, newest), decltype(silu)::value);
                add(grads[e], past, newest);
              });
        };
        if (exists && args.silu) {
          walk(std::true_type());
        } else if (exists) {
          walk(std::false_type());
        }
      }
      take_behind<kPast>(grads, behind, at, next);
#pragma unroll
      for (int i = 0; i < (kElements == 1 ? 1 : kPast); ++i) behind[i] = grads[i];
      auto convolve_back = [&](auto counts) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          results[e] = filter.taps[kPast] * grads[e];
#pragma unroll
          for (int i = 1; i <= kPast; ++i) {
            float const grad = e + i < kElements ? grads[e + i] : next[e + i - kElements];
            if (counts(e, i)) results[e] = fmaf(filter.taps[kPast - i], grad, results[e]);
          }
        }
      };
      if (inner) {
        convolve_back([](int, int) { return true; });
      } else {
        // Weights may be infinite: they count for nothing where no token of the sequence is.
        convolve_back(
            [&](int e, int i) { return (marks & (((1u << i) - 1) << (kPast + e + 1))) == 0; });
      }
      if (args.grad_final.data != nullptr && exists) {
#pragma unroll 1
        for (int e = 0; e < kElements; ++e) {
          Span const span = beginnings.span(args, to.batch(), token + e);
          int64_t const column = token + e - span.end + args.final_columns;
          if (column < 0) continue;
          float const grad = causal_conv1d::load(
              args.grad_final, offset(args.grad_final, span.index, at.channel, column));
#pragma unroll
          for (int k = 0; k < kElements; ++k) results[k] += k == e ? grad : 0.f;
        }
      }
      C chunk;
      chunk.pack(results);
      chunk.template store<true>(to.data(), exists);
      to.retreat();
    }
  }

  // The lanes of a channel add up, in an order that depends on nothing but their number.
#pragma unroll
  for (int j = 0; j <= kWidth; ++j) {
    for (int step = 1; step < at.lanes; step *= 2) {
      sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], step);
    }
    if (at.lane != 0 || !at.exists()) continue;
    args.parts[(at.chunk * (kWidth + 1) + j) * args.dim + at.channel] = sums[j];
  }
}

}  // namespace flashvar::causal_conv1d
