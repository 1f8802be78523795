// Where the sequences of a batch lie in a tensor, and which tiles of rows belong to which sequence.
//
// Dense: all sequences have one length; sequence b starts at b * batch_stride. Varlen: sequences
// are concatenated along the rows, and their offsets (cu_seqlens) are known only on the device. The
// host must size the grid without the lengths. It launches total / rows + batch tiles: sequence b
// owns the tile numbers from offsets[b] / rows + b up to those of sequence b + 1. These are at
// least as many as it needs, whatever the lengths; surplus tiles exit.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/ceil_div.h"

namespace flashvar {

// Rows of one sequence.
struct Span {
  int32_t first;  // row of the tensor; 0 for dense sequences, where the batch stride is the offset
  int32_t count;
};

// One tile of rows: its sequence and its first row within the sequence. The row may be past the end
// of the sequence: a surplus tile.
struct TileCoordinate {
  uint32_t batch;
  int32_t first;
};

struct Sequences {
  const int32_t* offsets;  // cu_seqlens, [batch + 1] in device memory; null: dense
  int32_t seqlen;          // dense: length of every sequence; varlen: an upper bound
  int32_t total;           // varlen: rows of all sequences together

  // Number of tiles of `rows` rows to launch.
  __host__ __device__ int64_t tiles(int64_t batch, int32_t rows) const {
    if (offsets != nullptr) return total / rows + batch;
    return batch * ceil_div(int64_t{seqlen}, rows);
  }

#ifdef __CUDACC__
  // Rows of a sequence. Offsets are clamped: inconsistent ones give empty sequences, never rows
  // outside the tensor.
  __device__ __forceinline__ Span span(uint32_t batch) const {
    if (offsets == nullptr) return {0, seqlen};
    int32_t const begin = min(max(offsets[batch], 0), total);
    return {begin, min(max(offsets[batch + 1], begin), total) - begin};
  }

  // Number of a sequence's first tile.
  __device__ __forceinline__ int64_t first_tile(uint32_t batch, int32_t rows) const {
    if (offsets == nullptr) return batch * ceil_div(int64_t{seqlen}, rows);
    return static_cast<uint32_t>(min(max(offsets[batch], 0), total)) / static_cast<uint32_t>(rows) +
           batch;
  }

  // The last sequence b whose number first(b) is at most `wanted`, or 0 where there is none;
  // numbers ascend. A 32-ary search, each lane of the warp probing another sequence, so that 32
  // sequences cost one memory latency and 1,024 cost two. Precondition: the warp is converged.
  template <class First>
  static __device__ __forceinline__ uint32_t last_at_most(uint32_t wanted, uint32_t batches,
                                                          First first) {
    uint32_t const lane = threadIdx.x % 32;
    uint32_t batch = 0;
    for (uint32_t candidates = batches; candidates > 1;) {
      uint32_t const step = ceil_div(candidates, 32);
      bool const fits = lane * step < candidates && first(batch + lane * step) <= wanted;
      // | 1: where no sequence fits, the result is the first.
      uint32_t const last = 31 - __clz(__ballot_sync(0xffffffffu, fits) | 1);
      batch += last * step;
      candidates = min(step, candidates - last * step);
    }
    return batch;
  }

  // Coordinate of the tile numbered `tile`, counted from the first sequence's first tile; within a
  // sequence, tile numbers ascend with rows.
  // Preconditions: the warp is converged; tile numbers fit 31 bits (launchers check).
  __device__ __forceinline__ TileCoordinate find(uint32_t tile, uint32_t batches,
                                                 int32_t rows) const {
    if (offsets == nullptr) {
      uint32_t const per_sequence = ceil_div(seqlen, rows);
      return {tile / per_sequence, static_cast<int32_t>(tile % per_sequence) * rows};
    }
    auto const first = [&](uint32_t b) { return static_cast<uint32_t>(first_tile(b, rows)); };
    uint32_t const wanted = tile + first(0);
    uint32_t const batch = last_at_most(wanted, batches, first);
    int64_t const row = int64_t{wanted - first(batch)} * rows;
    return {batch, static_cast<int32_t>(min(row, int64_t{total}))};
  }

#endif
};

}  // namespace flashvar
