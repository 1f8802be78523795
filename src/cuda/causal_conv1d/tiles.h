// How a call's elements are divided among threads. If channels are contiguous, a thread has some
// channels and iterates over tokens; if tokens are contiguous, it has one channel.
//
// Which tokens' gradients are summed together, and in which order, depends on the sizes and the
// alignment of the call's tensors alone, so that the bits are the same on every device. How many
// blocks share the work may depend on how many the device runs at a time (divide_tokens_among() in
// the forward, divide_channels_among() in the backward).
#pragma once
#include <algorithm>
#include <cstdint>

#include "causal_conv1d/problem.h"
#include "core/ceil_div.h"
#include "core/divisor.h"

namespace flashvar::causal_conv1d {

inline constexpr int kThreads = 256;
// Tokens, and channels, of a block of channel_rows_kernel.
inline constexpr int kCopyTile = 64;
// Blocks that keep a device busy: in launches with fewer, threads get less work each. Not more,
// because a block also reads rows of its neighbors, and in the backward leaves partial sums.
inline constexpr int64_t kBlocks = 256;
// Tiles of tokens that a block processes in about the time it takes to start: the fewest of a
// range, where a channel has as many.
inline constexpr int64_t kFewTiles = 8;

// Limits of ChannelTiles for one kernel.
struct ChannelLimits {
  int lanes_log2;          // most lanes of a group
  int min_rows, max_rows;  // of a thread
  int row_step;            // rows of a loop iteration: a thread has a multiple of them
  int64_t blocks;          // threads get more rows each only where as many blocks remain
};

// Contiguous channels: a group of `lanes` threads holds the channels of a row, and has `rows`
// consecutive rows, counted over the whole batch.
struct ChannelTiles {
  int64_t blocks;
  uint32_t column_blocks;  // blocks, adjacent in the grid, that share rows
  int32_t lanes_log2;
  int32_t rows;

  static ChannelTiles make(const Problem& problem, int elements, const ChannelLimits& limits) {
    ChannelTiles tiles{};
    while (tiles.lanes_log2 < limits.lanes_log2 &&
           int64_t{elements} << tiles.lanes_log2 < problem.dim) {
      ++tiles.lanes_log2;
    }
    int64_t const columns = int64_t{elements} << tiles.lanes_log2;
    tiles.column_blocks = static_cast<uint32_t>(ceil_div(problem.dim, columns));
    tiles.rows = limits.max_rows;
    while (tiles.rows > limits.min_rows && tiles.count(problem) < limits.blocks) tiles.rows /= 2;
    tiles.rows = ceil_div(tiles.rows, limits.row_step) * limits.row_step;
    tiles.blocks = tiles.count(problem);
    return tiles;
  }

  // Whether a block has all rows of its channels.
  __host__ __device__ bool is_whole() const { return blocks == column_blocks; }
  int64_t row_blocks(const Problem& problem) const {
    int64_t const block_rows = int64_t{rows} * (kThreads >> lanes_log2);
    return ceil_div(problem.batch * problem.seqlen, block_rows);
  }

 private:
  int64_t count(const Problem& problem) const { return row_blocks(problem) * column_blocks; }
};

// Where rows of contiguous tokens begin within the bytes that a thread loads at once, counted in
// elements: the row of batch entry b and channel c at first + b * batch + c * channel, modulo the
// elements of these bytes. It is the same for all tensors of a call.
struct Misalignment {
  uint32_t first, batch, channel;

  __host__ __device__ bool operator==(const Misalignment& other) const {
    return first == other.first && batch == other.batch && channel == other.channel;
  }
  // Binary logarithm of the distance between channels of equal misalignment. `elements`: of what a
  // thread loads at once.
  int period_log2(int elements) const {
    int log2 = 0;
    while ((channel << log2) % elements != 0) ++log2;
    return log2;
  }
};

// Contiguous tokens: a group of `lanes` threads holds a tile of tokens of one channel and iterates
// over a range, `tiles` consecutive tiles, counted over the whole batch. The groups of a block have
// nearby channels of the same range, whose misalignment is equal. Where blocks are fewer than
// channels need, each goes on to further channels of its range.
//
// Tiles are aligned to what a thread loads at once, so a row's first tile may begin before the row.
// Its first elements, and the last ones of the row's last tile, may belong to other rows.
struct TokenTiles {
  static constexpr int64_t kMaxWaves = 8;  // of blocks, that are considered

  int64_t blocks;
  int64_t per_channel;      // tiles of a channel, over the whole batch
  int32_t per_row;          // tiles of a batch entry
  uint32_t channel_blocks;  // blocks, adjacent in the grid, that share tokens
  int32_t lanes_log2;       // at most 5
  int32_t tiles;            // of a range
  int32_t apart_log2;       // the channels of adjacent groups of a block are 1 << apart_log2 apart
  Misalignment misalignment;
  Divisor per_row_divisor;

  static TokenTiles make(const Problem& problem, int elements,
                         const Misalignment& misalignment = {}) {
    TokenTiles tiles{};
    tiles.misalignment = misalignment;
    tiles.apart_log2 = misalignment.period_log2(elements);
    int64_t const length = problem.seqlen + (misalignment == Misalignment{} ? 0 : elements - 1);
    while (tiles.lanes_log2 < 5 && int64_t{elements} << tiles.lanes_log2 < length) {
      ++tiles.lanes_log2;
    }
    int64_t const tokens = int64_t{elements} << tiles.lanes_log2;
    tiles.per_row = static_cast<int32_t>(ceil_div(length, tokens));
    tiles.per_row_divisor = Divisor::make(static_cast<uint32_t>(tiles.per_row));
    tiles.per_channel = problem.batch * tiles.per_row;
    tiles.channel_blocks = tiles.of_all_misalignments(ceil_div(problem.dim, tiles.groups()));
    tiles.tiles = 1;
    tiles.blocks = tiles.ranges() * tiles.channel_blocks;
    return tiles;
  }

  // Divides the tokens among as many ranges as give no more than the `wanted` number of blocks, but
  // none with more than `max_tiles` tiles. All ranges but the last are equal, so that blocks end
  // together.
  void divide_tokens(int64_t wanted, int max_tiles) {
    set_ranges(std::max(std::min(wanted / std::max(channel_blocks, 1u), ranges_of(kFewTiles)),
                        ranges_of(max_tiles)));
  }

  // Divides the tokens among the number of ranges with the shortest estimated time on a device that
  // runs `resident` blocks at a time: the number of waves, times the tiles of a block. Its start
  // counts as kFewTiles tiles.
  void divide_tokens_among(int64_t resident, int max_tiles) {
    int64_t const fewest = ranges_of(max_tiles), most = std::max(ranges_of(kFewTiles), fewest);
    int64_t best = fewest, best_time = INT64_MAX;
    for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
      // The most ranges of so many waves, because they have the fewest tiles.
      int64_t const count =
          std::clamp(waves * resident / std::max(channel_blocks, 1u), fewest, most);
      set_ranges(count);
      int64_t const time = ceil_div(blocks, resident) * (tiles + kFewTiles);
      if (time < best_time) best = count, best_time = time;
    }
    set_ranges(best);
  }

  // Divides the channels among the number of blocks with the shortest estimated time, as above, for
  // several channels per group if there are fewer blocks. The sums that a group adds up stay the
  // same.
  void divide_channels_among(int64_t resident) {
    if (blocks == 0) return;
    int64_t const of_range = channel_blocks;
    int64_t best = ceil_div(blocks, resident) * (tiles + kFewTiles);
    for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
      int64_t const most = waves * resident / ranges();  // blocks of a range
      if (most == 0 || most >= of_range) continue;
      int64_t const each = ceil_div(of_range, most);  // channels of a group
      int64_t const time = waves * (each * tiles + kFewTiles);
      if (time >= best) continue;
      best = time;
      channel_blocks = of_all_misalignments(ceil_div(of_range, each));
    }
    blocks = ranges() * channel_blocks;
  }

  // Whether a block has all tokens of its channels.
  __host__ __device__ bool is_whole() const { return blocks == channel_blocks; }
  __host__ __device__ int32_t lanes() const { return 1 << lanes_log2; }
  __host__ __device__ int32_t groups() const { return kThreads >> lanes_log2; }
  __host__ __device__ int64_t ranges() const { return ceil_div(per_channel, tiles); }

 private:
  // Ranges of so many tiles, at least one.
  int64_t ranges_of(int64_t range_tiles) const {
    return std::max(ceil_div(per_channel, range_tiles), int64_t{1});
  }
  void set_ranges(int64_t count) {
    tiles = static_cast<int32_t>(std::max(ceil_div(per_channel, count), int64_t{1}));
    blocks = ranges() * channel_blocks;
  }
  // Rounds up a number of blocks, so that there are equally many for each misalignment.
  uint32_t of_all_misalignments(int64_t count) const {
    int64_t const period = int64_t{1} << apart_log2;
    return static_cast<uint32_t>((count + period - 1) >> apart_log2 << apart_log2);
  }
};

}  // namespace flashvar::causal_conv1d
