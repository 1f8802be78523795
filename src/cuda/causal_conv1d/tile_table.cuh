// Layout "bdt", tokens contiguous: a thread's channel, its tiles, and the table of a block's tiles.
#pragma once
#include <cstdint>

#include "causal_conv1d/sequences.cuh"
#include "causal_conv1d/tiles.h"
#include "ptx/pin.cuh"
#include "ptx/shared_pointer.cuh"

namespace flashvar::causal_conv1d {

// The work of a thread: its channel, its lane in each tile, and the block's tiles of the channel,
// `count` tiles from number `first` on, counted over the whole batch.
struct TokenWork {
  int32_t lane, lanes;
  int64_t range, channel;
  int64_t first;
  int32_t count;
  bool exists;  // the channel

  // Distance from a block's channels to its next channels, whose misalignment is the same.
  static __device__ __forceinline__ int64_t channel_step(const TokenTiles& tiles) {
    return int64_t{tiles.channel_blocks} * tiles.groups();
  }
  // Goes on to the block's next channels; false, for the whole block, if there are none.
  __device__ __forceinline__ bool next_channels(const Problem& problem, const TokenTiles& tiles) {
    channel += channel_step(tiles);
    exists = channel < problem.dim;
    return any_exist(problem, tiles);
  }
  // Whether any of the block's channels exists, the same for all of its threads. There are blocks
  // without: their number is rounded up (TokenTiles).
  __device__ __forceinline__ bool any_exist(const Problem& problem, const TokenTiles& tiles) const {
    return channel - (threadIdx.x >> tiles.lanes_log2 << tiles.apart_log2) < problem.dim;
  }

  __device__ __forceinline__ TokenWork(const Problem& problem, const TokenTiles& tiles)
      : lane(ptx::pin_by_shuffle(threadIdx.x & (tiles.lanes() - 1))),
        lanes(tiles.lanes()),
        range(blockIdx.x / tiles.channel_blocks),
        channel(channel_of(blockIdx.x % tiles.channel_blocks, tiles)),
        first(range * tiles.tiles),
        count(static_cast<int>(min(int64_t{tiles.tiles}, tiles.per_channel - first))),
        exists(channel < problem.dim) {}

 private:
  // The channel of the thread's group in block `block` of a range.
  static __device__ __forceinline__ int64_t channel_of(uint32_t block, const TokenTiles& tiles) {
    int64_t const group =
        int64_t{block >> tiles.apart_log2} * tiles.groups() + (threadIdx.x >> tiles.lanes_log2);
    return group << tiles.apart_log2 | (block & ((1u << tiles.apart_log2) - 1));
  }
};

// A batch entry, and the index of a tile in it.
struct TileNumber {
  int64_t batch;
  int32_t tile;
};

// A tile's batch entry, and its first token there: negative where the row starts within a thread's
// elements.
struct TokenCoordinate {
  int64_t batch, token;
};

// Those of a thread's elements in a tile that are tokens of its row: [first, end).
struct RowElements {
  int32_t first, end;

  __device__ __forceinline__ bool contain(int e) const { return first <= e && e < end; }
  template <class V>
  __device__ __forceinline__ bool are_all_of() const {
    return first == 0 && end == V::kElements;
  }
};

// A table of the block's tiles in shared memory, computed once for all of its channels: the tiles'
// offsets in kTensors tensors, and for each thread and tile marks, which say where sequences begin.
//
// Tiles are numbered in the order in which threads process them, and loaded kAhead ahead. The table
// has entries for further tiles, which are loaded ahead but have no elements. In the backward,
// which goes from the last tile to the first, the first of these is the tile before the block's:
// its last lane loads the elements before the block's first.
//
// Bit i of a thread's marks: a sequence begins at the thread's element i - kPast. So there are bits
// for the elements up to kPast before the thread's own and kAfter after them; bit 0 is unused. With
// kNone the thread has no elements of its own in the tile, and no other mark but kLoads.
template <int kPast, int kElements, int kAfter, int kTiles, int kAhead, int kTensors,
          bool kBackward_>
class TileTable {
  static constexpr int kBits = kPast + kElements + kAfter, kNumbers = kTiles + kAhead;
  static constexpr int kRow = 33;  // marks of a tile: of 32 lanes, and of threads without a channel
  static_assert(kBits <= 26);

 public:
  static constexpr bool kBackward = kBackward_;
  static constexpr uint32_t kNone = 1u << 31;
  // A sequence begins at one of the elements that the constructor's `by_token` names. Both bits are
  // set, or none: whether any of two bits is set takes one instruction, as does a test of the sign
  // bit, and a test of any other single bit takes more.
  static constexpr uint32_t kByToken = 3u << 29;
  // The thread has elements, and the constructor's `adds_tensor` is true: the kernel adds another
  // tensor, in the forward a residual, in the backward grad_final.
  static constexpr uint32_t kAddsTensor = 1u << 28;
  // The thread loads elements ahead: its own, or those before the block's first; none if the row
  // ends among them. Two bits, for the reason of kByToken's.
  static constexpr uint32_t kLoads = 3u << 26;
  // Masks of these bits. kAtFirst: a sequence begins at the thread's first element. kAfterLast: one
  // begins right after its last element (kAfter > 0 only). kAny: one begins at any of the elements.
  static constexpr uint32_t kAtFirst = 1u << kPast;
  static constexpr uint32_t kAfterLast = 1u << (kPast + kElements);
  static constexpr uint32_t kAny = (1u << kBits) - 2;

  struct Shared {
    TileNumber first;
    int64_t index;  // of the sequence of the first token that is read
    int64_t offsets[kTensors][kNumbers];
    uint32_t marks[kNumbers * kRow];
  };

  // Position in the table of a thread: its current tile, and access to the tiles ahead.
  class Cursor {
   public:
    // Starts at the first tile. `exists`: whether the thread's channel does.
    __device__ __forceinline__ Cursor(const Shared& shared, const TokenWork& at, bool exists)
        : marks_(shared.marks + (exists ? at.lane : kRow - 1)), offsets_(&shared.offsets[0][0]) {}

    // Marks, or offset in a tensor, of the tile `ahead` tiles after the current one.
    __device__ __forceinline__ uint32_t marks(int ahead) const { return marks_[ahead * kRow]; }
    __device__ __forceinline__ int64_t offset(int tensor, int ahead) const {
      return offsets_[tensor * kNumbers + ahead];
    }
    __device__ __forceinline__ void advance(int tiles) {
      marks_.advance(tiles * kRow);
      offsets_.advance(tiles);
    }

   private:
    ptx::SharedPointer<uint32_t> marks_;
    ptx::SharedPointer<int64_t> offsets_;
  };

  // Fills the table; called by all threads of the block. `by_token`: marks that set kByToken.
  // `adds_tensor`: whether to set kAddsTensor. First start(number, coordinate, loads) is called for
  // each of the first kAhead tiles, so that their loads are in flight while the table is filled;
  // `loads`: whether the thread loads elements, as kLoads. The forward also starts the tile before
  // them, number -1.
  template <class Start>
  __device__ __forceinline__ TileTable(Shared& shared, const Problem& problem,
                                       const TokenTiles& tiles, const TokenWork& at,
                                       uint32_t by_token, bool adds_tensor,
                                       const Tensor* const (&tensors)[kTensors], Start start)
      : cursor_(shared, at, at.exists),
        shared_(shared),
        tiles_(tiles),
        at_(at),
        by_token_(by_token) {
    // A Divisor takes numbers below 2^31.
    int64_t const batch = at.first >> 31 == 0
                              ? static_cast<uint32_t>(at.first) / tiles.per_row_divisor
                              : at.first / tiles.per_row;
    TileNumber const first{batch, static_cast<int32_t>(at.first - batch * tiles.per_row)};
#pragma unroll
    for (int number = kBackward ? 0 : -1; number < kAhead; ++number) {
      TokenCoordinate const tile = loaded_coordinate(first, number);
      RowEnds const ends(problem, tile.token, at.lane);
      start(number, tile, at.exists && loads(first, number, at.lane, ends));
    }
    int64_t const begin = coordinate(first, kBackward ? at.count - 1 : 0).token;
    int const numbers = min(at.count + 2 * kAhead - 1, kNumbers);
    // A warp has a tile at a time, so what depends on the tile alone is the same for its lanes.
    int const lane = static_cast<int>(threadIdx.x) % 32;
    for (int number = static_cast<int>(threadIdx.x) / 32; number < numbers;
         number += kThreads / 32) {
      RowEnds const ends(problem, coordinate(first, number).token, lane);
      bool const exists = number < at.count && lane < at.lanes && ends.left > 0;
      uint32_t const starts =
          mark(-ends.passed) | mark(ends.left) | (adds_tensor ? kAddsTensor : 0);
      uint32_t* const row = shared.marks + number * kRow;
      row[lane] = (exists ? starts : kNone) |
                  (lane < at.lanes && loads(first, number, lane, ends) ? kLoads : 0);
      if (lane == 0) row[kRow - 1] = kNone;
    }
    for (int number = threadIdx.x; number < numbers; number += kThreads) {
      TokenCoordinate const tile = loaded_coordinate(first, number);
#pragma unroll
      for (int i = 0; i < kTensors; ++i) {
        shared.offsets[i][number] =
            tile.batch * tensors[i]->strides[0] + tile.token * tensors[i]->strides[1];
      }
    }
    int64_t index = 0;
    if (is_varlen(problem)) index = find_by_warp(problem, max(begin - kPast, int64_t{0}));
    if (threadIdx.x == 0) {
      shared.first = first;
      shared.index = index;
    }
    __syncthreads();  // offsets, marks of the ends of batch entries, first and index are written
    if (!is_varlen(problem)) return;
    int64_t const end = begin + int64_t{at.count} * at.lanes * kElements;
    for (int64_t i = index + 1 + threadIdx.x; i < problem.sequences; i += kThreads) {
      int64_t const row = load(problem.cu_seqlens, i);
      if (row >= end + kAfter) break;
      mark_near(max(row, int64_t{0}), begin);
    }
    __syncthreads();  // all sequences are marked
  }

  // A cursor at the first tile. `exists`: whether the thread's channel does.
  __device__ __forceinline__ Cursor begin(bool exists) const { return {shared_, at_, exists}; }
  // As Cursor's, of a cursor that the table keeps for the thread.
  __device__ __forceinline__ uint32_t marks(int ahead) const { return cursor_.marks(ahead); }
  __device__ __forceinline__ int64_t offset(int tensor, int ahead) const {
    return cursor_.offset(tensor, ahead);
  }
  __device__ __forceinline__ void advance(int tiles) { cursor_.advance(tiles); }

  __device__ __forceinline__ TokenCoordinate coordinate(int number) const {
    return coordinate(shared_.first, number);
  }
  // Coordinate of the thread's first element.
  __device__ __forceinline__ TokenCoordinate thread_coordinate(int number) const {
    TokenCoordinate const tile = coordinate(number);
    return {tile.batch, tile.token + at_.lane * kElements};
  }
  // Which of the thread's elements of a tile are tokens of its row.
  __device__ __forceinline__ RowElements row_elements(const Problem& problem, int number) const {
    if constexpr (kElements == 1) return {0, 1};
    int64_t const token = thread_coordinate(number).token,
                  left = max(problem.seqlen - token, int64_t{0});
    return {static_cast<int32_t>(max(-token, int64_t{0})),
            static_cast<int32_t>(min(left, int64_t{kElements}))};
  }

  // The sequence of a token of the block's tiles.
  __device__ __forceinline__ Sequence sequence(const Problem& problem, int64_t batch,
                                               int64_t token) const {
    if (!is_varlen(problem)) return {batch, batch, 0, problem.seqlen};
    return find(problem, token, shared_.index);
  }

 private:
  // Whether there is a tile before the block's, in the same batch entry.
  __device__ __forceinline__ bool has_before(const TileNumber& first) const {
    return first.tile > 0;
  }
  // Coordinate of tile `number`, clamped to the tiles from which lanes load: the block's and, where
  // there is one, the tile before them.
  __device__ __forceinline__ TokenCoordinate loaded_coordinate(const TileNumber& first,
                                                               int number) const {
    int const before = has_before(first) ? 1 : 0;
    int const least = kBackward ? 0 : -before, most = at_.count - 1 + (kBackward ? before : 0);
    return coordinate(first, min(max(number, least), most));
  }
  // A lane's distance to both ends of the row: `passed` tokens are before its first element in the
  // tile, a negative number if the row begins after it, and `left` ones are from it on. A tile
  // farther away than kMany counts as kMany away.
  struct RowEnds {
    static constexpr int64_t kMany = 1 << 30;
    int32_t passed, left;

    __device__ __forceinline__ RowEnds(const Problem& problem, int64_t tile, int lane)
        : passed(static_cast<int32_t>(min(tile, kMany)) + lane * kElements),
          left(static_cast<int32_t>(min(problem.seqlen - tile, kMany)) - lane * kElements) {}
  };
  // Whether a lane loads elements of tile `number`. In the tile before the block's, only the last
  // lane does.
  __device__ __forceinline__ bool loads(const TileNumber& first, int number, int lane,
                                        const RowEnds& ends) const {
    bool const is_before = number == (kBackward ? at_.count : -1);
    bool const is_read =
        is_before ? has_before(first) && lane == at_.lanes - 1 : number < at_.count;
    return is_read && ends.left >= kElements;
  }
  __device__ __forceinline__ TokenCoordinate coordinate(const TileNumber& first, int number) const {
    uint32_t const tile = first.tile + (kBackward ? at_.count - 1 - number : number);
    uint32_t const batches = tile / tiles_.per_row_divisor;
    int64_t const batch = first.batch + batches;
    return {batch, int64_t{tile - batches * tiles_.per_row} * (at_.lanes * kElements) -
                       misalignment(batch)};
  }
  // Elements of other rows before the first token in the first tile of a batch entry.
  __device__ __forceinline__ int32_t misalignment(int64_t batch) const {
    if constexpr (kElements == 1) return 0;
    const Misalignment& by = tiles_.misalignment;
    uint32_t const elements = by.first + static_cast<uint32_t>(batch) * by.batch +
                              static_cast<uint32_t>(at_.channel) * by.channel;
    return static_cast<int32_t>(elements % kElements);
  }
  // The mark of a sequence that begins so many elements after a thread's first.
  template <class Distance>
  __device__ __forceinline__ uint32_t mark(Distance distance) const {
    Distance const bit = distance + kPast;
    if (bit <= 0 || bit >= kBits) return 0;
    return 1u << bit | ((by_token_ >> bit & 1) != 0 ? kByToken : 0);
  }
  // Marks the start of a sequence for all threads that read near it. `begin`: the first element of
  // the block's tiles.
  __device__ __forceinline__ void mark_near(int64_t row, int64_t begin) {
    int64_t const last = row - begin + kPast - 1;  // the last element that may be near
    if (last < 0) return;
    for (int64_t index = last / kElements; index >= 0; --index) {
      uint32_t const bits = mark(row - begin - index * kElements);
      if (bits == 0) return;
      if (index >= int64_t{at_.count} * at_.lanes) continue;
      auto const of_block = static_cast<int>(index) >> tiles_.lanes_log2;
      int const number = kBackward ? at_.count - 1 - of_block : of_block;
      uint32_t& marks = shared_.marks[number * kRow + (static_cast<int>(index) & (at_.lanes - 1))];
      if ((marks & kNone) == 0) atomicOr(&marks, bits);
    }
  }

  Cursor cursor_;
  Shared& shared_;
  const TokenTiles& tiles_;
  const TokenWork& at_;
  uint32_t by_token_;
};

}  // namespace flashvar::causal_conv1d
