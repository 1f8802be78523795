// The forward of layout "bdt", tokens contiguous. A thread has some tokens of one channel in each
// tile, and reads them and those before them. The next tiles are loaded meanwhile.
#pragma once
#include <cstdint>

#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/state.cuh"
#include "causal_conv1d/tokens.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct FwdTokensArgs : FwdProblem {
  TokenTiles tiles;  // blocks after theirs write the final states
};

// kElements: per thread and tile; with one, strides and the dtype of the residual are arbitrary.
// kAhead: tiles that are loaded ahead. kTiles: most tiles of a block.
template <class Dtype, int kWidth, int kElements, int kAhead, int kTiles, int kBlocksPerSM>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    fwd_tokens_kernel(const __grid_constant__ FwdTokensArgs args) {
  constexpr int kPast = kWidth - 1;
  using V = Vec<Dtype, kElements>;
  using Word = typename Dtype::Word;
  enum { kX, kY, kResidual, kTensors };
  using Tiles = TileTable<kPast, kElements, 0, kTiles, kAhead, kTensors, false>;
  using Reader = TokenReader<Dtype, kPast, kElements, kAhead, Tiles>;
  constexpr int kStages = Reader::kStages;
  static_assert(kTiles % kStages == 0);
  __shared__ typename Tiles::Shared shared;
  // Aligned to 128 bytes: otherwise each warp's copy of 512 bytes takes longer.
  __shared__ __align__(128) typename Reader::Shared shared_x;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  if (blockIdx.x >= args.tiles.blocks) {
    write_final(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  TokenWork const at(args, args.tiles);
  if (!at.any_exist(args, args.tiles)) return;
  // Starts of sequences for which a warp goes token by token, with for_each_token(). With
  // states, all. Otherwise those that loads do not handle: loads of single elements never read
  // other sequences; wider ones leave them out only where a sequence begins at the thread's first
  // element.
  uint32_t const by_token = args.state.data != nullptr ? Tiles::kAny
                            : kElements == 1           ? 0
                                                       : Tiles::kAny - Tiles::kAtFirst;
  bool const has_residual = args.residual.data != nullptr;
  int64_t const first = int64_t{at.lane} * kElements;  // the thread's first token in a tile
  const Word* const x = ptx::pin_by_shuffle(static_cast<const Word*>(args.x.data) +
                                            offset(args.x, 0, first, at.channel));
  Word* const y =
      ptx::pin_by_shuffle(static_cast<Word*>(args.y.data) + offset(args.y, 0, first, at.channel));
  FilterBits<kWidth> const bits(args, at.channel, at.exists);
  Reader reader(shared_x, at, args.x.strides[1]);
  Tiles table(shared, args, args.tiles, at, by_token, has_residual,
              {&args.x, &args.y, &args.residual},
              [&](int number, const TokenCoordinate& tile, bool loads) {
                if constexpr (kElements > 1) {
                  reader.copy(number, x + offset(args.x, tile.batch, tile.token, 0), loads);
                  if (number >= 0) ptx::cp_async_commit();
                }
              });
  auto load = [&](int stage, int number, int ahead) {
    reader.load(stage, number, x + table.offset(kX, ahead), table.marks(ahead));
  };
  if constexpr (kElements == 1) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) load(stage, stage, stage);
  }
  ChannelFilter<kWidth> const filter(args, bits);

  for (int done = 0; done < at.count; done += kStages, table.advance(kStages)) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      int const number = done + stage;
      uint32_t const marks = table.marks(stage);
      bool const exists = (marks & Tiles::kNone) == 0, adds = (marks & Tiles::kAddsTensor) != 0;
      float values[kPast + kElements], y_values[kElements];
      if constexpr (kElements > 1) {
        ptx::cp_async_wait<Reader::kPending>();
        __syncwarp();  // all lanes have loaded their part of the tile
      }
      reader.read(stage, number, marks, values);
      // All lanes have read the slot of the previous tile, which the load overwrites.
      if constexpr (kElements > 1) __syncwarp();
      load(stage, number + kAhead, stage + kAhead);
      ptx::cp_async_commit();

      bool const plain = !__any_sync(0xffffffffu, (marks & Tiles::kByToken) != 0);
      if (!plain) {
        if (kElements > 1 && exists) {
          load_last<V, kPast>(args.x, table.thread_coordinate(number), at.channel,
                              table.row_elements(args, number), values);
        }
        for_each_token<kPast, kElements>(args, table, at, number, marks, values,
                                         [&](int e, const float (&past)[kPast], float newest) {
                                           y_values[e] = filter.convolved(past, newest);
                                         });
      } else {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          y_values[e] = filter.convolved(values + e, values[kPast + e]);
        }
      }
      activate(y_values, args.silu);
      if (adds) {
        int64_t const index =
            table.offset(kResidual, stage) + offset(args.residual, 0, first, at.channel);
        float more[kElements];
        if constexpr (kElements > 1) {
          V added;
          auto const* const from = static_cast<const Word*>(args.residual.data) + index;
          if (plain) {
            added.template load<true>(from, 1);
          } else {
            added = load_row_elements<V>(table.row_elements(args, number), from);
          }
          added.unpack(more);
        } else {
          more[0] = causal_conv1d::load(args.residual, index);
        }
#pragma unroll
        for (int e = 0; e < kElements; ++e) y_values[e] += more[e];
      }
      V vec;
      vec.pack(y_values);
      Word* const to = y + table.offset(kY, stage);
      if (kElements == 1 || plain) {
        vec.template store<true>(to, exists);
      } else if (exists) {
        store_row_elements(vec, table.row_elements(args, number), to);
      }
    }
  }
}

}  // namespace flashvar::causal_conv1d
