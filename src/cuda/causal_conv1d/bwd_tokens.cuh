// The backward of layout "bdt", tokens contiguous. A thread has some tokens of one channel in each
// tile, and reads them and those before them. The gradients of the tokens after them come from
// other lanes, and from the next tile: a block goes from its last tile to its first.
#pragma once
#include <cstdint>

#include "causal_conv1d/filter.cuh"
#include "causal_conv1d/state.cuh"
#include "causal_conv1d/sums.cuh"
#include "causal_conv1d/tokens.cuh"
#include "core/dynamic_shared.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashvar::causal_conv1d {

struct BwdTokensArgs : BwdProblem {
  TokenTiles tiles;  // blocks after theirs write the gradients of states
};

// Computes the gradients, with respect to the activation's input, of the first kPast tokens after
// the block's last tile. They are another block's tokens. All loads are issued before the first is
// waited for.
template <int kPast, int kElements, class TileTable>
__device__ __forceinline__ void compute_next_tile(const BwdProblem& problem, const TileTable& table,
                                                  const TokenWork& at,
                                                  const ChannelFilter<kPast + 1>& filter,
                                                  float (&next_tile)[kElements == 1 ? 1 : kPast]) {
  TokenCoordinate const last = table.coordinate(0);
  int64_t const token = last.token + int64_t{at.lanes} * kElements + at.lane;
  float grad = 0.f;
  if (at.exists && at.lane < kPast && token < problem.seqlen) {
    Sequence const sequence = table.sequence(problem, last.batch, token);
    int64_t const position = token - sequence.begin;
    uint32_t bits[kPast + 1] = {};
#pragma unroll
    for (int back = 0; back <= kPast; ++back) {
      if (position < back) break;
      bits[back] = load_bits(problem.x, offset(problem.x, last.batch, token - back, at.channel));
    }
    uint32_t const of_grad =
        load_bits(problem.grad_y, offset(problem.grad_y, last.batch, token, at.channel));
    float values[kPast + 1];
#pragma unroll
    for (int back = 0; back <= kPast; ++back) {
      values[kPast - back] = position < back
                                 ? state_token(problem, sequence, at.channel, back - position)
                                 : value_of(problem.x, bits[back]);
    }
    grad = grad_activated(value_of(problem.grad_y, of_grad),
                          filter.convolved(values, values[kPast]), problem.silu);
  }
  if constexpr (kElements == 1) {
    next_tile[0] = grad;
  } else {
#pragma unroll
    for (int i = 0; i < kPast; ++i) next_tile[i] = __shfl_sync(0xffffffffu, grad, i, at.lanes);
  }
}

// Adds the gradients of final states to those of a thread's elements.
template <int kElements, class TileTable>
__device__ __forceinline__ void add_grad_final(const BwdProblem& problem, const TileTable& table,
                                               const TokenWork& at, int number,
                                               float (&results)[kElements]) {
  TokenCoordinate const coordinate = table.thread_coordinate(number);
  RowElements const of_row = table.row_elements(problem, number);
#pragma unroll 1
  for (int e = of_row.first; e < of_row.end; ++e) {
    Sequence const sequence = table.sequence(problem, coordinate.batch, coordinate.token + e);
    int64_t const column = coordinate.token + e - sequence.end + problem.final_columns;
    if (column < 0) continue;
    float const grad =
        load(problem.grad_final, offset(problem.grad_final, sequence.index, at.channel, column));
#pragma unroll
    for (int k = 0; k < kElements; ++k) results[k] += k == e ? grad : 0.f;
  }
}

// Computes the gradients of a thread's x from its gradients and the `next` ones; `counts(e, i)`:
// whether that of token e + i is one of the same sequence as token e.
template <int kWidth, int kElements, class Counts>
__device__ __forceinline__ void convolve_back(const ChannelFilter<kWidth>& filter,
                                              const float (&grads)[kElements],
                                              const float (&next)[kWidth - 1],
                                              float (&results)[kElements], Counts counts) {
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    results[e] = filter.taps[kWidth - 1] * grads[e];
#pragma unroll
    for (int i = 1; i < kWidth; ++i) {
      float const grad = e + i < kElements ? grads[e + i] : next[e + i - kElements];
      if (counts(e, i)) results[e] = fmaf(filter.taps[kWidth - 1 - i], grad, results[e]);
    }
  }
}

// Adds up the sums of a channel's lanes, in an order that depends on nothing but their number, and
// stores them: as gradients, or as the block's part.
template <int kWidth>
__device__ __forceinline__ void store_sums(const BwdTokensArgs& args, const TokenWork& at,
                                           float (&sums)[kWidth + 1]) {
#pragma unroll
  for (int j = 0; j <= kWidth; ++j) {
    for (int step = 1; step < at.lanes; step *= 2) {
      sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], step);
    }
    if (at.lane != 0 || !at.exists) continue;
    if (args.tiles.is_whole()) {
      store_sum<kWidth>(args.grad_weight, args.grad_bias, at.channel, j, sums[j]);
    } else {
      args.parts[(at.range * (kWidth + 1) + j) * args.dim + at.channel] = sums[j];
    }
  }
}

// kElements: per thread and tile; with one, strides are arbitrary. kAhead: tiles that are loaded
// ahead. kTiles: most tiles of a block.
template <class Dtype_, int kWidth_, int kElements_, int kAhead_, int kTiles, int kBlocksPerSM_>
struct BwdTokensConfig {
  using Dtype = Dtype_;
  static constexpr int kWidth = kWidth_, kPast = kWidth - 1, kElements = kElements_;
  static constexpr int kAhead = kAhead_, kBlocksPerSM = kBlocksPerSM_;
  enum { kX, kGradY, kGradX, kTensors };
  using Tiles = TileTable<kPast, kElements, kPast, kTiles, kAhead, kTensors, true>;
  using Reader = TokenReader<Dtype, kPast, kElements, kAhead, Tiles>;
  using GradReader = TokenReader<Dtype, 0, kElements, kAhead, Tiles>;
  static_assert(kTiles % Reader::kStages == 0);
  struct Shared {
    typename Reader::Shared x;
    typename GradReader::Shared grad_y;
    typename Tiles::Shared tiles;
  };
};

// Over 100 lines, because the steps of a tile share the sums and what is loaded ahead, in
// registers.
template <class Config>
__global__ void __launch_bounds__(kThreads, Config::kBlocksPerSM)
    bwd_tokens_kernel(const __grid_constant__ BwdTokensArgs args) {
  constexpr int kWidth = Config::kWidth, kPast = Config::kPast, kElements = Config::kElements;
  constexpr int kAhead = Config::kAhead;
  using Dtype = typename Config::Dtype;
  using V = Vec<Dtype, kElements>;
  using Word = typename Dtype::Word;
  using Tiles = typename Config::Tiles;
  using Reader = typename Config::Reader;
  using GradReader = typename Config::GradReader;
  constexpr int kStages = Reader::kStages;
  auto& shared = dynamic_shared<typename Config::Shared>();
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();  // the preceding kernel has written the inputs
  if (blockIdx.x >= args.tiles.blocks) {
    write_grad_state(args, blockIdx.x - args.tiles.blocks);
    return;
  }
  TokenWork at(args, args.tiles);
  if (!at.any_exist(args, args.tiles)) return;
  // As in the forward. In addition, a sequence that ends with a thread's last element needs no
  // for_each_token(): convolve_back() leaves out the elements that follow.
  uint32_t const by_token = args.state.data != nullptr || kElements == 1
                                ? Tiles::kAny
                                : Tiles::kAny - Tiles::kAtFirst - Tiles::kAfterLast;
  bool const has_grad_final = args.grad_final.data != nullptr;
  int64_t const first = int64_t{at.lane} * kElements;  // the thread's first token in a tile
  const Word* x = ptx::pin_by_shuffle(static_cast<const Word*>(args.x.data) +
                                      offset(args.x, 0, first, at.channel));
  const Word* grad_y = ptx::pin_by_shuffle(static_cast<const Word*>(args.grad_y.data) +
                                           offset(args.grad_y, 0, first, at.channel));
  Word* grad_x = ptx::pin_by_shuffle(static_cast<Word*>(args.grad_x.data) +
                                     offset(args.grad_x, 0, first, at.channel));

  FilterBits<kWidth> bits(args, at.channel, at.exists);
  Reader reader(shared.x, at, args.x.strides[1]);
  GradReader grad_reader(shared.grad_y, at, args.grad_y.strides[1]);
  Tiles table(shared.tiles, args, args.tiles, at, by_token, has_grad_final,
              {&args.x, &args.grad_y, &args.grad_x},
              [&](int number, const TokenCoordinate& tile, bool loads) {
                if constexpr (kElements > 1) {
                  reader.copy(number, x + offset(args.x, tile.batch, tile.token, 0), loads);
                  grad_reader.copy(number, grad_y + offset(args.grad_y, tile.batch, tile.token, 0),
                                   loads);
                  ptx::cp_async_commit();
                }
              });
  int64_t const channel_step = TokenWork::channel_step(args.tiles);
  // Several elements at once are loaded kAhead iterations before they are processed, also those of
  // the next channel. A channel takes an iteration for each of the block's tiles, one for the tile
  // before them, and at least kAhead in all.
  int const iterations = max(at.count + 1, kAhead);
  typename Tiles::Cursor loaded = table.begin(at.exists);
  loaded.advance(kAhead);
  int64_t loaded_channel = at.channel;
  int left = iterations - kAhead;  // iterations of the channel that are still to be loaded
  auto load = [&](const typename Tiles::Cursor& from, int stage, int number, int ahead) {
    uint32_t const marks = from.marks(ahead);
    int64_t const of_x = from.offset(Config::kX, ahead);
    int64_t const of_grad_y = from.offset(Config::kGradY, ahead);
    reader.load(stage, number, x + of_x, marks);
    grad_reader.load(stage, number, grad_y + of_grad_y, marks);
  };
  auto load_next_channels = [&] {
    x += channel_step * args.x.strides[2];
    grad_y += channel_step * args.grad_y.strides[2];
    loaded_channel += channel_step;
    loaded = table.begin(loaded_channel < args.dim);
  };
  // Starts the loads of an iteration, counted over all channels.
  auto load_iteration = [&](int iteration) {
    if (left == 0) {
      load_next_channels();
      left = iterations;
    }
    load(loaded, 0, iteration, 0);
    ptx::cp_async_commit();
    loaded.advance(1);
    --left;
  };
  int const next_lane = ptx::pin_by_shuffle(static_cast<int>(threadIdx.x & 31u & ~(at.lanes - 1)) |
                                            ((at.lane + 1) & (at.lanes - 1)));
  int iteration = 0;
  while (true) {
    typename Tiles::Cursor tile = table.begin(at.exists);
    if constexpr (kElements == 1) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) load(tile, stage, stage, stage);
    }
    ChannelFilter<kWidth> const filter(args, bits);
    float next_tile[kElements == 1 ? 1 : kPast];
    compute_next_tile<kPast, kElements>(args, table, at, filter, next_tile);
    float sums[kWidth + 1] = {};  // the gradients of the weights, and that of the bias
    auto add = [&](float grad, const float* past, float newest) {
#pragma unroll
      for (int j = 0; j < kPast; ++j) sums[j] = fmaf(grad, past[j], sums[j]);
      sums[kPast] = fmaf(grad, newest, sums[kPast]);
      sums[kWidth] += grad;
    };

    for (int done = 0; done < at.count; done += kStages, tile.advance(kStages)) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        int const number = done + stage;
        uint32_t const marks = tile.marks(stage);
        bool const exists = (marks & Tiles::kNone) == 0;
        // Values before the thread's own, then its own; its gradients, and those after them.
        float values[kPast + kElements], grads[kElements], next[kPast], results[kElements];
        if constexpr (kElements > 1) {
          ptx::cp_async_wait<Reader::kPending>();
          __syncwarp();  // the tile and the one before it in tokens are loaded
        }
        reader.read(stage, iteration, marks, values);
        grad_reader.read(stage, iteration, marks, grads);
        if constexpr (kElements == 1) {
          load(tile, stage, number + kAhead, stage + kAhead);
        } else {
          // Overwrites the slot of the previous iteration, which all lanes had read before the
          // barrier above.
          load_iteration(iteration + kAhead);
        }
        ++iteration;
        bool const plain = !__any_sync(0xffffffffu, (marks & Tiles::kByToken) != 0);
        if (plain && args.silu) {
#pragma unroll
          for (int e = 0; e < kElements; ++e) {
            grads[e] =
                grad_activated(grads[e], filter.convolved(values + e, values[kPast + e]), true);
            add(grads[e], values + e, values[kPast + e]);
          }
        } else if (exists) {
          RowElements const of_row = table.row_elements(args, number);
          if constexpr (kElements > 1) {
            TokenCoordinate const coordinate = table.thread_coordinate(number);
            load_last<V, kPast>(args.x, coordinate, at.channel, of_row, values);
            load_last<V, 0>(args.grad_y, coordinate, at.channel, of_row, grads);
          }
          for_each_token<kPast, kElements>(
              args, table, at, number, marks, values,
              [&](int e, const float (&past)[kPast], float newest) {
                grads[e] = grad_activated(grads[e], filter.convolved(past, newest), args.silu);
                if (of_row.contain(e)) add(grads[e], past, newest);
              });
        }
        take_next<kPast>(grads, next_tile, at, next_lane, next);
#pragma unroll
        for (int i = 0; i < (kElements == 1 ? 1 : kPast); ++i) next_tile[i] = grads[i];
        // Terms beyond the end of the sequence are skipped, not multiplied by 0: weights may be
        // inf.
        if (plain) {
          bool const ends = (marks & Tiles::kAfterLast) != 0;
          convolve_back(filter, grads, next, results,
                        [&](int e, int i) { return e + i < kElements || !ends; });
        } else {
          convolve_back(filter, grads, next, results, [&](int e, int i) {
            return (marks & (((1u << i) - 1) << (kPast + e + 1))) == 0;
          });
        }
        if ((marks & Tiles::kAddsTensor) != 0) {
          add_grad_final<kElements>(args, table, at, number, results);
        }
        V vec;
        vec.pack(results);
        // Equivalent to `exists`, but needs no register of its own.
        if ((ptx::pin(marks) & Tiles::kNone) == 0) {
          Word* const to = grad_x + tile.offset(Config::kGradX, stage);
          if (kElements == 1 || plain) {
            vec.template store<true>(to, 1);
          } else {
            store_row_elements(vec, table.row_elements(args, number), to);
          }
        }
      }
    }
    if constexpr (kElements > 1) {
#pragma unroll 1
      for (int number = at.count; number < iterations; ++number, ++iteration) {
        // The slot that the load overwrites: copies to it are complete, and all lanes have read it.
        ptx::cp_async_wait<Reader::kPending>();
        __syncwarp();
        reader.skip();
        load_iteration(iteration + kAhead);
      }
    }
    int64_t const next_channel = at.channel + channel_step;
    bits = FilterBits<kWidth>(args, next_channel, next_channel < args.dim);
    store_sums<kWidth>(args, at, sums);
    if (!at.next_channels(args, args.tiles)) return;
    grad_x += channel_step * args.grad_x.strides[2];
    if constexpr (kElements == 1) load_next_channels();
  }
}

}  // namespace flashvar::causal_conv1d
