// The forward where tokens lie beside each other. A thread has some of a channel in each tile, and
// loads each once: the tokens before its own come from other lanes. The next tiles are on their way
// meanwhile.
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

// kElements: of a thread in a tile, kStages: tiles that are read ahead, kTiles: of a chunk, at
// most. With one element, strides and the dtype of the residual may be any.
template <class Dtype, int kWidth, int kElements, int kStages, int kTiles>
__global__ void __launch_bounds__(kThreads, 3)
    fwd_tokens_kernel(const __grid_constant__ FwdTokensArgs args) {
  constexpr int kPast = kWidth - 1;
  using C = Chunk<Dtype, kElements>;
  using Word = typename Dtype::Word;
  using Cursor = TileCursor<Dtype, kElements>;
  using Marks = Beginnings<kPast, kElements, 0, kTiles>;
  __shared__ typename Marks::Shared shared;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (blockIdx.x >= args.tiles.blocks) {
    write_final(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  TokenPlace const at(args, args.tiles, kElements);
  bool const adds = args.residual.data != nullptr;
  Cursor from(args.x, args.tiles, at, 0), to(args.y, args.tiles, at, 0);
  C before, chunks[kStages];
  before.template load<true>(from.data_before(), at.tile > 0 && at.sees_next<kPast, kElements>());
  auto load = [&](int stage, int number) {
    chunks[stage].template load<true>(from.data(), number < at.count && from.tile < at.own_tiles);
    from.advance();
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) load(stage, stage);
  ChannelFilter<kWidth> const filter(args, at.channel, at.exists());
  Marks const beginnings(shared, args, args.tiles, at);

  for (int first = 0; first < at.count; first += kStages) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      int const number = first + stage;
      if (number >= at.count) break;
      bool const exists = to.tile < at.own_tiles;
      C added{};
      int64_t place = 0;  // of the residual
      if (adds && exists) {
        place = offset(args.residual, to.batch(), at.token(to.tile, kElements), at.channel);
        if constexpr (kElements > 1) {
          added.template load<true>(static_cast<const Word*>(args.residual.data) + place, 1);
        }
      }
      float values[kPast + kElements], y[kElements];
      take_before<kPast>(chunks[stage], before, at, values);
      before = chunks[stage];
      unpack_behind<kPast>(before, values);
      load(stage, number + kStages);

      uint32_t const marks = beginnings(number, at);
      if (__any_sync(0xffffffffu, marks)) {
        each_token<kPast, kElements>(args, beginnings, exists ? marks : 0, to.batch(),
                                     at.token(to.tile, kElements), at.channel, values,
                                     [&](int e, const float (&past)[kPast], float newest) {
                                       y[e] = filter.convolved(past, newest);
                                     });
      } else {
#pragma unroll
        for (int e = 0; e < kElements; ++e) y[e] = filter.convolved(values + e, values[kPast + e]);
      }
      activate(y, args.silu);
      if (adds && exists) {
        float more[kElements];
        if constexpr (kElements > 1) {
          added.unpack(more);
        } else {
          more[0] = causal_conv1d::load(args.residual, place);
        }
#pragma unroll
        for (int e = 0; e < kElements; ++e) y[e] += more[e];
      }
      C chunk;
      chunk.pack(y);
      chunk.template store<true>(to.data(), exists);
      to.advance();
    }
  }
}

}  // namespace flashvar::causal_conv1d
